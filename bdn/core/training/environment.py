"""What the commands of a rank find in their environment, and where they find their directories."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import InvalidMountError
from bdn.core.source.uri import check_mounts

ARCHIVE: Final = "/b10/archive"
WORKSPACE: Final = "/b10/workspace"
SCRATCH: Final = "/mnt/bt-scratch"
CHECKPOINTS: Final = "/mnt/ckpts"  # unless the request names another directory, as the next two
LOADED: Final = "/tmp/loaded_checkpoints"  # noqa: S108 - in the job's own /tmp
CACHES: Final = "/root/.cache"
_OURS: Final = ("/b10", SCRATCH, "/proc", "/sys", "/dev")
_RESERVED: Final = "BT_"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # POSIX.1-2024, section 3.216
_REFERENCE: Final = re.compile(r"\$(?:(BT_[A-Z0-9_]+)|\{(BT_[A-Z0-9_]+)\})")


@dataclass(frozen=True, slots=True)
class JobPlaces:
    """The directories of a job by their paths in it; None: the job has no such directory.

    ``caches`` is the base of the training caches.
    """

    working: str | None = WORKSPACE
    checkpoints: str | None = None
    loaded: str | None = None
    caches: str | None = None
    huggingface: bool = False

    @property
    def project_cache(self) -> str:
        return f"{self.caches}/user_artifacts"

    @property
    def team_cache(self) -> str:
        return f"{self.caches}/team_artifacts"

    @property
    def huggingface_cache(self) -> str | None:
        return f"{self.caches}/huggingface" if self.huggingface else None

    def requested(self) -> Iterator[str]:
        yield from filter(None, (self.checkpoints, self.loaded))
        if self.caches is not None:
            yield from filter(None, (self.project_cache, self.team_cache, self.huggingface_cache))


def check_places(places: JobPlaces, mounts: list[str]) -> None:
    """Raise ``InvalidMountError`` for places that are equal, inside each other, or inside a directory of ours.

    Places with a colon are refused, too: engines separate the parts of a volume by colons.
    """
    requested = [*mounts, *places.requested()]
    for place in requested:
        if ":" in place:
            raise InvalidMountError(place, "must not hold ':', at which container engines split it")
        if (ours := next((one for one in _OURS if place == one or place.startswith(f"{one}/")), None)) is not None:
            raise InvalidMountError(place, f"is at or below {ours}, which is not for jobs to choose")
        if any(one.startswith(f"{place}/") for one in _OURS):
            raise InvalidMountError(place, "holds a directory of the job's own")
    check_mounts(requested)


def is_variable(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def ignored(given: Mapping[str, object]) -> list[str]:
    """The variables of a request that are not set, because their names are ours."""
    return sorted(name for name in given if name.startswith(_RESERVED))


@dataclass(frozen=True, slots=True)
class RankOf:
    """Which rank of which job, for its variables."""

    job_id: str
    job_name: str
    project_id: str
    project_name: str
    rank: int
    group_size: int
    gpus: int
    leader: str


def environment(of: RankOf, places: JobPlaces, plain: Mapping[str, str], secret: Mapping[str, str]) -> dict[str, str]:
    """The complete environment. In ``plain`` values references to our variables are replaced, and nothing else."""
    ours = {
        "BT_TRAINING_JOB_ID": of.job_id,
        "BT_TRAINING_JOB_NAME": of.job_name,
        "BT_TRAINING_PROJECT_ID": of.project_id,
        "BT_TRAINING_PROJECT_NAME": of.project_name,
        "BT_SCRATCH_DIR": SCRATCH,
        "BT_NUM_GPUS": str(of.gpus),
        "BT_GROUP_SIZE": str(of.group_size),
        "BT_NODE_RANK": str(of.rank),
        "BT_LEADER_ADDR": of.leader,
        "BT_RETRY_COUNT": "0",
    }
    some = {
        "BT_WORKING_DIR": places.working,
        "BT_CHECKPOINT_DIR": places.checkpoints,
        "BT_LOAD_CHECKPOINT_DIR": places.loaded,
        "BT_PROJECT_CACHE_DIR": places.caches and places.project_cache,
        "BT_RW_CACHE_DIR": places.caches and places.project_cache,
        "BT_TEAM_CACHE_DIR": places.caches and places.team_cache,
    }
    ours |= {name: value for name, value in some.items() if value is not None}

    def known(found: re.Match[str]) -> str:
        return ours.get(found[1] or found[2], found[0])

    users = {name: _REFERENCE.sub(known, value) for name, value in plain.items()} | dict(secret)
    return {name: value for name, value in users.items() if not name.startswith(_RESERVED)} | ours
