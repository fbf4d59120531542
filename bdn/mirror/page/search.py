"""The search box: a text leads to nodes, mirrors, sources, digests, paths and jobs."""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import NotFoundError
from bdn.mirror.access.callers import Caller
from bdn.mirror.page.rendering import path_of
from bdn.mirror.page.sources import Sources
from bdn.wire.training_schema import TrainingJobSearch

_SHOWN: Final = 20  # results of each kind, the newest or first
_MIRRORS: Final = 1000  # the newest, whose sources are searched
_LONGEST_ID: Final = 256
_MIRROR: Final = re.compile(r"mir_[0-9a-f]{24}")
_DIGEST: Final = re.compile(r"(b3:)?[0-9a-f]{64}")
_Result = tuple[str, str, str]  # what it is, its name and its address


@dataclass(frozen=True)
class SearchResult:
    text: str
    results: Sequence[_Result]

    @property
    def only(self) -> str | None:
        """The address of the single result."""
        return self.results[0][2] if len(self.results) == 1 else None


async def search(sources: Sources, caller: Caller, text: str) -> SearchResult:
    return SearchResult(text, [one async for one in _results(sources, caller, text)] if text else [])


async def _results(sources: Sources, caller: Caller, text: str) -> AsyncIterator[_Result]:
    if "\0" in text:
        return
    if _MIRROR.fullmatch(text):
        try:
            found = await sources.requests.get(text, caller.organisation, caller.team)
        except NotFoundError:
            return
        yield "Mirror", found.id, path_of("mirror", id=found.id)
        return
    if _DIGEST.fullmatch(text):
        yield "Digest", text, path_of("model", of=text if text.startswith("b3:") else f"b3:{text}")
        return
    if text.startswith("/"):
        yield "Path", text, path_of("model", of=text)
        return
    if caller.team is None:
        nodes = [agent for agent in await sources.agents.get() if text.lower() in agent.node.lower()]
        exact = [agent for agent in nodes if agent.node == text]
        for agent in (exact or nodes)[:_SHOWN]:
            yield "Node", agent.node, path_of("node", cluster=agent.cluster, node=agent.node)
    if len(text) <= _LONGEST_ID:
        jobs = await _jobs(sources, caller, text)
        for job, name, project in jobs:
            yield "Job", f"{project}/{job}, {name}", path_of("job", id=job)
        if not jobs and (await sources.job_stages.of(caller, text, limit=1))[0]:
            yield "Job", text, path_of("job", id=text)
    mirrors, _ = await sources.requests.page(caller.organisation, None, None, None, _MIRRORS, team=caller.team)
    named = [one.source for mirror in mirrors for one in mirror.sources if text.lower() in one.source.lower()]
    for source in [text] if text in named else [*dict.fromkeys(named)][:_SHOWN]:
        yield "Source", source, path_of("model", of=source)


async def _jobs(sources: Sources, caller: Caller, text: str) -> Sequence[tuple[str, str, str]]:
    """Id, name and project of the training job of this id, else of jobs with the text in their id or name."""
    if exact := await sources.training_jobs.search(caller, TrainingJobSearch(job_id=text)):
        return [(job.id, job.name, job.training_project.name) for job in exact]
    return await sources.projects.jobs_named(caller.organisation, caller.team, text, _SHOWN)
