"""Checkpoints that a job loads: which ones, as of now, and where each node finds them."""

from collections.abc import Callable, Sequence

from bdn.core.errors import InvalidMountError, NotFoundError
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.checkpoints import LOOSE
from bdn.mirror.db import checkpoints, projects
from bdn.mirror.db.checkpoints import CheckpointState
from bdn.mirror.db.database import ReadSession
from bdn.mirror.db.tables import Json, TrainingJobRow
from bdn.wire.training_schema import LoadedCheckpoint


def extra_source(
    source: str, mount_location: str, *, ranks: Sequence[int] | None = None, is_archive: bool = False
) -> Json:
    """A source beside the weights, as it is stored with the job. Only these ``ranks`` get it; None: all."""
    return {
        "source": source,
        "mount_location": mount_location,
        "ranks": None if ranks is None else list(ranks),
        "is_archive": is_archive,
    }


async def loaded(
    session: ReadSession, row: TrainingJobRow, wanted: Sequence[LoadedCheckpoint], folder: str, nodes: int
) -> tuple[list[Json], list[str]]:
    """The sources of these checkpoints, by the ids of their projects, and warnings.

    A checkpoint of as many ranks as the job has nodes: node n gets ``rank-n`` and ``rank-0``. Of others each node gets
    all ranks. A job's own project without a checkpoint is a warning: a script that resumes has a first run.

    Raises:
        NotFoundError: the checkpoint is unknown.
        InvalidMountError: two checkpoints would have the same place.
    """
    extras: dict[str, Json] = {}
    warnings: list[str] = []
    for one in wanted:
        found = await _found(session, row, one)
        if not found:
            if one.typ == "baseten_named_checkpoint" or one.job_id is not None:
                raise NotFoundError(f"a checkpoint {one.checkpoint_name or ''} of training job {one.job_id}")
            warnings.append("this project has no checkpoint yet: nothing is loaded")
        ranks = {state.row.rank for state in found}
        for state in found:
            rank, name = state.row.rank, state.row.name
            place = f"{folder}/rank-{rank}" + ("" if name == LOOSE else f"/{name}")
            uri = CheckpointUri(state.project.id, state.row.job, name, rank)
            if (known := extras.get(place)) is not None and known["source"] != str(uri):
                raise InvalidMountError(place, f"would hold two checkpoints, {known['source']} and {uri}: load one")
            its = [rank] if len(ranks) == nodes and rank else None
            extras[place] = extra_source(str(uri), place, ranks=its)
    return list(extras.values()), warnings


async def _found(session: ReadSession, row: TrainingJobRow, wanted: LoadedCheckpoint) -> list[CheckpointState]:
    """All ranks of the checkpoint; empty if the job or the job's own project has none."""
    own = row.project
    project: str | None = None
    if wanted.project_name is not None:
        named = await projects.find(session, row.organisation, wanted.project_name, row.requester_team)
        if named is None:
            raise NotFoundError(f"project {wanted.project_name!r}")
        project = named.id
    elif wanted.job_id is None:
        project = own
    known = await checkpoints.listed(
        session, row.organisation, row.requester_team, project=project, job=wanted.job_id, with_details=False
    )
    known = [one for one in known if one.row.job != row.id and (one.row.name == LOOSE or one.row.name[0] != ".")]
    is_meant: Callable[[CheckpointState], bool] = lambda one: one.row.is_loadable  # noqa: E731
    if wanted.checkpoint_name is not None:
        is_meant = lambda one: one.row.name == wanted.checkpoint_name  # noqa: E731
    candidates = [one for one in known if is_meant(one)]
    if not candidates:
        if project is not None and project != own:
            raise NotFoundError(f"a checkpoint of project {wanted.project_name!r}")
        return []
    newest = max(candidates, key=lambda one: checkpoints.age(one.row))
    key = (newest.project.id, newest.row.job, newest.row.name)
    found = [one for one in known if (one.project.id, one.row.job, one.row.name) == key]
    return sorted(found, key=lambda one: one.row.rank)
