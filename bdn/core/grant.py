"""What an agent may read and where it shall stand: all that a job controller hands to a node."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import Digest, digest_of
from bdn.core.source.uri import check_mounts, normalise_mount

AUDIENCE: Final = "bdn-agent"


@dataclass(frozen=True, slots=True)
class GrantedMount:
    """One manifest and the place where its files shall stand. ``source`` is for people: it names where they came from."""

    mount_location: str
    manifest: Digest
    source: str

    def __post_init__(self) -> None:
        if normalise_mount(self.mount_location) != self.mount_location:
            msg = f"mount_location {self.mount_location!r} is not normalised"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of an organisation's job to read these manifests until ``expires_at`` (seconds since the epoch)."""

    organisation: str
    mounts: tuple[GrantedMount, ...]
    expires_at: float

    def __post_init__(self) -> None:
        if not self.mounts:
            msg = "a grant names at least one mount"
            raise ValueError(msg)
        check_mounts([mount.mount_location for mount in self.mounts])

    def allows(self, manifest: Digest) -> bool:
        """Whether this grant lets its bearer read the manifest and its chunks."""
        return any(mount.manifest == manifest for mount in self.mounts)


def stage_id_of(job_id: str, organisation: str, mounts: Iterable[GrantedMount]) -> str:
    """The id of the stage that a job's grant asks for: equal content, equal id, so that asking twice is asking once.

    A renewed grant differs in its expiry alone and therefore names the same stage.
    """
    lines = sorted(f"{mount.mount_location}\0{mount.manifest}" for mount in mounts)
    text = "".join(f"{len(part)}:{part}" for part in (job_id, organisation, *lines))  # no two lists make one text
    return f"stg_{digest_of(text.encode('utf-8', 'surrogatepass')).hex[:24]}"
