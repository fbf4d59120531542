"""The views of training jobs: those that are active, and one with its phases, nodes, log and checkpoints."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from bdn.core.errors import NotFoundError
from bdn.core.training.states import ACTIVE
from bdn.mirror.access.access import Caller
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
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, Show, View
from bdn.wire.training_schema import PREFIX, LogQuery, TrainingJob, TrainingJobSearch

_LINES: Final = 200
_LISTED: Final = 200
_ID: Final = re.compile(r"[a-z0-9]{10}")


async def _read_all(sources: Sources, caller: Caller, asked: Asked) -> Show:
    statuses = None if asked["all"] else [f"{PREFIX}{status}" for status in ACTIVE]
    found = await sources.training_jobs.search(caller, TrainingJobSearch(statuses=statuses))
    now = sources.now()
    views = [job_view(job, now) for job in found[:_LISTED]]

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("job_parts.html")
        yield Part(macros.list_heading(asked, len(found), len(views)))
        yield Group('<ul id="jobs" class="cards">', [Part(macros.card(view)) for view in views], "</ul>")

    return show


async def _read_one(sources: Sources, caller: Caller, asked: Asked) -> Show:
    """Raises ``NotFoundError`` for a job of which nothing is known, and for one of another team or organisation."""
    job = await _found(sources, caller, asked["id"])
    if job is None:
        raise NotFoundError(f"job {asked['job'][:200]}")
    view = job_view(job, sources.now())
    weights = await _weights(sources, caller, view)
    log = await _log(sources, caller, view)
    checkpoints = await _checkpoints(sources, caller, view)

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("job_parts.html")
        yield Part(macros.heading(view, caller.team is None))
        yield Part(macros.weights(view, weights, caller.team is None))
        yield Part(macros.ranks_title(view))
        ranks = [Part(macros.rank(view, line, caller.team is None), "table") for line in view.ranks]
        yield Group(macros.ranks_head(), ranks, "</tbody></table></div>")
        yield Part(macros.checkpoints(checkpoints, caller.team is None))
        yield Part(macros.log(log, _LINES))

    return show


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


JOBS: Final = View("jobs", "Jobs", "view.html", _read_all, ("all",))
JOB: Final = View("job", "Job", "view.html", _read_one, ("id",), is_in_menu=False)
