"""Stages on disk: enough to go on after a kill, and to find out later what a job used; and the events about them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest
from bdn.core.errors import Fact
from bdn.core.events import Ending, Event
from bdn.disk.durable import disk_errors, write_at_once, write_durably
from bdn.wire.shapes import ErrorBody
from bdn.wire.stage_schema import BytesFrom, ExposureKind, StageState, Transfer, ViewKind
from node_agent.disk.places import Places


class MountRecord(BaseModel):
    """One mount of a stage."""

    mount_location: str
    manifest: str
    source: str
    view: ViewKind | None = None
    view_reason: str | None = None
    exposure: ExposureKind | None = None
    files_total: int | None = None
    bytes_total: int | None = None
    bytes_from: BytesFrom = BytesFrom()

    @property
    def digest(self) -> Digest:
        """The manifest's name."""
        return Digest.parse(self.manifest)


class StageRecord(BaseModel):
    """One stage. Times are seconds since the epoch. The grant makes the file private.

    ``expires_at`` is what people are told. What counts is ``ttl_seconds``, from the last renewal or the start of the agent.

    ``destination`` is set for a pulled view; ``inode`` then tells its directory from another one at the same path.
    """

    id: str
    job_id: str
    organisation: str
    grant: str
    state: StageState
    created_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    ttl_seconds: float | None = None
    bytes_per_second: float | None = None
    transfer: Transfer | None = None
    error: ErrorBody | None = None
    destination: Path | None = None
    inode: int | None = None
    warm: bool = False
    mounts: list[MountRecord]

    @property
    def lifetime(self) -> float | None:
        """Seconds that it lives without being renewed; None means until it is released."""
        if self.ttl_seconds is None and self.expires_at is not None:  # of an agent that recorded no ttl
            return max(0.0, self.expires_at - self.created_at)
        return self.ttl_seconds

    @property
    def holder(self) -> Holder:
        """The lease's holder."""
        return Holder(self.id, self.job_id, self.expires_at, self.organisation)

    @property
    def manifests(self) -> dict[Digest, None]:
        """The manifests it names, each once, in order."""
        return dict.fromkeys(mount.digest for mount in self.mounts)


@dataclass(frozen=True)
class StageRecords:
    """Reads and writes the folder ``stages``. Blocking."""

    places: Places

    def save(self, record: StageRecord) -> None:
        """Make it durable. Raises ``DiskFailedError``."""
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_durably(path, record.model_dump_json().encode())

    def note(self, record: StageRecord) -> None:
        """Let it outlive this process, for a stage that is only begun; a warm one would wait longest for the disk.

        A power cut may take it back: whoever waits for the stage hears of that, and asks again. Raises ``DiskFailedError``.
        """
        path = self.places.stage(record.id)
        with disk_errors(path):
            write_at_once(path, record.model_dump_json().encode())

    def forget(self, stage_id: str) -> None:
        """Remove it."""
        with disk_errors(self.places.stage(stage_id)):
            self.places.stage(stage_id).unlink(missing_ok=True)

    def load_all(self) -> Iterator[StageRecord]:
        """Every record that can be read; one that cannot goes to the quarantine."""
        with disk_errors(self.places.stages):
            for path in sorted(self.places.stages.iterdir()):
                if path.suffix != ".json":
                    path.unlink()  # a record that was being written; the one before it, if any, is whole
                    continue
                try:
                    yield StageRecord.model_validate_json(path.read_bytes())
                except ValueError:
                    path.rename(self.places.quarantine / path.name)


Account = Callable[[StageRecord], Sequence[Event]]


def arrived(record: StageRecord) -> list[Event]:
    """READY: where the bytes came from, over all mounts of a manifest."""
    return [
        _event(
            "arrived",
            record,
            manifest,
            {
                "node": sum(mount.bytes_from.node for mount in record.mounts if mount.manifest == manifest),
                "cluster": sum(mount.bytes_from.cluster for mount in record.mounts if mount.manifest == manifest),
                "mirror": sum(mount.bytes_from.mirror for mount in record.mounts if mount.manifest == manifest),
            },
        )
        for manifest in _manifests(record)
    ]


def failed(record: StageRecord) -> list[Event]:
    """FAILED, with the error that the record holds."""
    return _events("failed", record, _error_of(record))


def not_mended(record: StageRecord) -> list[Event]:
    """Still READY, with the error that the record holds."""
    return _events("not_mended", record, _error_of(record))


def renewed(record: StageRecord) -> list[Event]:
    """Another end, or none."""
    return _events("renewed", record, {"expires_at": record.expires_at})


def nothing(_: StageRecord) -> list[Event]:
    """Nothing was decided anew."""
    return []


def ended(ending: Ending, record: StageRecord) -> list[Event]:
    """RELEASED, for whatever reason."""
    return _events("ended", record, {"ending": ending, "expires_at": record.expires_at})


def resumed(record: StageRecord) -> list[Event]:
    """The agent started again, and the stage goes on where it was."""
    return _events("resumed", record, {"state": record.state})


def _events(kind: str, record: StageRecord, facts: Mapping[str, Fact]) -> list[Event]:
    return [_event(kind, record, manifest, facts) for manifest in _manifests(record)]


def _event(kind: str, record: StageRecord, manifest: str, facts: Mapping[str, Fact]) -> Event:
    facts = {"stage": record.id, "job": record.job_id, **facts}
    return Event.of(kind, facts, manifest=manifest, organisation=record.organisation)


def _manifests(record: StageRecord) -> list[str]:
    return list(dict.fromkeys(mount.manifest for mount in record.mounts))


def _error_of(record: StageRecord) -> dict[str, Fact]:
    error = record.error
    return (
        {"code": error.code, "problem": error.message}
        if error
        else {"code": "INTERNAL", "problem": "it is not known why"}
    )
