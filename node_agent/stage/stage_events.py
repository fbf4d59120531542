"""What is decided about a stage, as events: one for each of its manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bdn.core.errors import Fact
from bdn.core.events import Ending, Event
from node_agent.stage.record import StageRecord

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
