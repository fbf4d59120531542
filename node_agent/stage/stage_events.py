"""What is decided about a stage, as events: one for each of its manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.events.decision import Decision
from bdn.core.events.stages import Arrived, Ended, Ending, Failed, NotMended, Renewed, Resumed
from bdn.wire.stage_schema import BytesFrom
from node_agent.stage.record import StageRecord

Account = Callable[[StageRecord], Sequence[Decision]]


def arrived(record: StageRecord) -> list[Decision]:
    """READY: where the bytes came from, over all mounts of a manifest."""
    return [
        Arrived(
            **_about(record, manifest),
            node=sum(mount.bytes_from.node for mount in record.mounts if mount.manifest == manifest),
            cluster=sum(mount.bytes_from.cluster for mount in record.mounts if mount.manifest == manifest),
            mirror=sum(mount.bytes_from.mirror for mount in record.mounts if mount.manifest == manifest),
        )
        for manifest in _manifests(record)
    ]


def failed(record: StageRecord) -> list[Decision]:
    """FAILED, with the error that the record holds."""
    return [Failed(**_about(record, manifest), **_error_of(record)) for manifest in _manifests(record)]


def not_mended(record: StageRecord) -> list[Decision]:
    """Still READY, with the error that the record holds."""
    return [NotMended(**_about(record, manifest), **_error_of(record)) for manifest in _manifests(record)]


def renewed(record: StageRecord) -> list[Decision]:
    """Another end, or none."""
    return [Renewed(**_about(record, manifest), expires_at=record.expires_at) for manifest in _manifests(record)]


def nothing(_: StageRecord) -> list[Decision]:
    """Nothing was decided anew."""
    return []


def ended(ending: Ending, record: StageRecord) -> list[Decision]:
    """RELEASED, for whatever reason."""
    return [
        Ended(**_about(record, manifest), ending=ending, expires_at=record.expires_at)
        for manifest in _manifests(record)
    ]


def resumed(record: StageRecord) -> list[Decision]:
    """The agent started again, and the stage goes on where it was."""
    return [Resumed(**_about(record, manifest), state=record.state) for manifest in _manifests(record)]


def prefetched(manifests: Mapping[Digest, BytesFrom], holder: Holder) -> list[Decision]:
    """A prefetch is READY: bytes by manifest."""
    return [
        Arrived(
            manifest=str(manifest),
            organisation=holder.organisation,
            stage=holder.stage_id,
            job=holder.job_id,
            **came.model_dump(),
        )
        for manifest, came in manifests.items()
    ]


def prefetch_failed(manifests: Sequence[Digest], holder: Holder, error: BdnError) -> list[Decision]:
    """A prefetch has failed, or was canceled."""
    return [
        Failed(
            manifest=str(manifest),
            organisation=holder.organisation,
            stage=holder.stage_id,
            job=holder.job_id,
            code=error.code,
            problem=str(error),
        )
        for manifest in manifests
    ]


def _manifests(record: StageRecord) -> list[str]:
    return list(dict.fromkeys(mount.manifest for mount in record.mounts))


def _error_of(record: StageRecord) -> dict[str, str]:
    error = record.error
    return (
        {"code": error.code, "problem": error.message}
        if error
        else {"code": "INTERNAL", "problem": "it is not known why"}
    )


def _about(record: StageRecord, manifest: str) -> dict[str, Any]:
    return {"manifest": manifest, "organisation": record.organisation, "stage": record.id, "job": record.job_id}
