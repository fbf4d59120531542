"""The views of training jobs: those that are active, and one with its phases, nodes, log and checkpoints."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from bdn.core.errors import NotFoundError
from bdn.core.training.states import ACTIVE
from bdn.mirror.access.callers import Caller
from bdn.mirror.page.job_nodes import NodeLine, lines_of_stages, slowest
from bdn.mirror.page.job_view import (
    CheckpointLine,
    JobView,
    LogText,
    Weights,
    checkpoint_lines,
    job_view,
    log_lines,
    weights_of,
)
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.rendering import Macros, Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.stage_schema import JobStage
from bdn.wire.training_schema import JOBS_AT_ONCE, PREFIX, LogQuery, TrainingJob, TrainingJobSearch

_LINES: Final = 200
_LISTED: Final = 200
_NODES: Final = 1000
_NODES_SHOWN: Final = 200
_MANIFESTS: Final = 20  # of a job that is known by its stages alone
_ID: Final = re.compile(r"[a-z0-9]{10}")


async def _read_all(sources: Sources, caller: Caller, asked: Asked) -> Show:
    statuses = None if asked["all"] else [f"{PREFIX}{status}" for status in ACTIVE]
    found = await sources.training_jobs.search(caller, TrainingJobSearch(statuses=statuses))
    now = sources.now()
    views = [job_view(job, now) for job in found[:_LISTED]]

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("job_parts.html")
        yield Part(macros.list_heading(asked, len(found), len(views), len(found) == JOBS_AT_ONCE))
        yield Group('<ul id="jobs" class="cards">', [Part(macros.card(view)) for view in views], "</ul>")

    return show


async def _read_one(sources: Sources, caller: Caller, asked: Asked) -> Show:
    """A training job, or else what nodes stage under this name. Of both, what the caller may see."""
    name, now = asked["id"], sources.now()
    stages, _ = await sources.job_stages.of(caller, name, limit=_NODES)
    job = await _found(sources, caller, name)
    if job is None:
        return _staged(name, lines_of_stages(stages, now), _weights_of_stages(stages), is_linked=caller.team is None)
    view = job_view(job, now, stages)
    weights = await _weights(sources, caller, view)
    log = await _log(sources, caller, view)
    checkpoints = await _checkpoints(sources, caller, view)

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros, is_linked = templates.macros("job_parts.html"), caller.team is None
        yield Part(macros.heading(view, is_linked))
        yield Part(macros.weights(view, weights, is_linked))
        yield Part(macros.nodes_title(len(view.ranks), _NODES_SHOWN))
        yield _nodes(macros, view.ranks, is_linked=is_linked)
        yield Part(macros.checkpoints(checkpoints, is_linked))
        yield Part(macros.log(log, _LINES))

    return show


def _staged(name: str, lines: Sequence[NodeLine], manifests: Sequence[str], *, is_linked: bool) -> Show:
    def show(templates: Templates) -> Iterator[Part | Group]:
        macros, behind = templates.macros("job_parts.html"), slowest(lines)
        yield Part(macros.staged_heading(name, behind, len(lines), manifests if is_linked else ()))
        yield Part(macros.nodes_title(len(lines), _NODES_SHOWN))
        yield _nodes(macros, lines, is_linked=is_linked)

    return show


def _nodes(macros: Macros, lines: Sequence[NodeLine], *, is_linked: bool) -> Group:
    rows = [Part(macros.node(number, line, is_linked), "table") for number, line in enumerate(lines[:_NODES_SHOWN])]
    return Group(macros.nodes_head(), rows, "</tbody></table></div>")


def _weights_of_stages(stages: Sequence[JobStage]) -> list[str]:
    return list(dict.fromkeys(manifest for stage in stages for manifest in stage.manifests))[:_MANIFESTS]


async def _found(sources: Sources, caller: Caller, name: str) -> TrainingJob | None:
    if not _ID.fullmatch(name):
        return None
    found = await sources.training_jobs.search(caller, TrainingJobSearch(job_id=name))
    return found[0] if found else None


async def _weights(sources: Sources, caller: Caller, view: JobView) -> list[Weights]:
    if view.mirror_id is None:
        return []
    with suppress(NotFoundError):  # mirrors expire before the jobs that used them
        return weights_of(await sources.requests.get(view.mirror_id, caller.organisation, caller.team))
    return []


async def _log(sources: Sources, caller: Caller, view: JobView) -> list[LogText]:
    query = LogQuery(direction="desc", limit=_LINES)
    return log_lines((await sources.training_jobs.log(caller, view.project_id, view.id, query)).logs)


async def _checkpoints(sources: Sources, caller: Caller, view: JobView) -> list[CheckpointLine]:
    found = await sources.projects.checkpoints(caller.organisation, caller.team, view.project_id, view.id)
    return checkpoint_lines(found)


JOBS: Final = PageView("jobs", "Jobs", "view.html", _read_all, ("all",))
JOB: Final = PageView("job", "Job", "view.html", _read_one, ("id",), is_in_menu=False)
