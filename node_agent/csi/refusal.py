"""Answers that are not a success: which code the kubelet gets for which error, and the figures while it waits."""

from dataclasses import dataclass
from typing import Final, Self

from grpc import StatusCode

from bdn.core.errors import BdnError
from bdn.core.printable import printable
from bdn.core.units import format_duration, format_size
from bdn.wire.mirror_schema import Mirror
from bdn.wire.progress import Progress, progress_of_mirror, progress_of_stage
from bdn.wire.stage_schema import StageDocument

LONGEST_PROGRESS: Final = 200  # characters
_LONGEST_SOURCE: Final = 110
_LONGEST_TEXT: Final = 900  # an event of Kubernetes has 1024 bytes, and the kubelet puts words around ours

# After these the kubelet considers the volume uncertain: it calls again, or unpublishes (kubelet, csi_client.go,
# isFinalError). After every other code it does neither for a pod that is deleted, so nothing may be left then.
_UNCERTAIN: Final = (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED, StatusCode.ABORTED)

# docs/kubernetes.md has this table for users.
CODES: Final[dict[StatusCode, str]] = {
    StatusCode.INVALID_ARGUMENT: "INVALID_REQUEST INVALID_SOURCE INVALID_MOUNT NO_FILES_MATCHED LIMIT_EXCEEDED",
    StatusCode.NOT_FOUND: "NOT_FOUND SOURCE_NOT_FOUND REVISION_NOT_FOUND SECRET_NOT_FOUND",
    StatusCode.PERMISSION_DENIED: (
        "AUTH_REQUIRED UNAUTHENTICATED FOREIGN_REQUEST GATED_SOURCE EGRESS_REFUSED GRANT_INVALID"
    ),
    StatusCode.FAILED_PRECONDITION: (
        "NOT_SUPPORTED SECRET_MALFORMED SOURCE_ARCHIVED SOURCE_CHANGED CHECKSUM_MISMATCH CANCELED IN_USE NO_ROOM "
        "CACHE_TOO_SMALL DISK_FAILED MOUNT_FAILED CHUNKS_MISSING PUSH_GIVEN_UP CACHE_AFFINITY CACHE_NOT_SHARED "
        "CACHE_OVER_QUOTA SCRATCH_FULL"
    ),
    StatusCode.RESOURCE_EXHAUSTED: "CACHE_FULL UPSTREAM_RATE_LIMITED QUOTA_EXCEEDED",
    StatusCode.UNAVAILABLE: "STORE_UNAVAILABLE UPSTREAM_UNAVAILABLE GRANT_EXPIRED",
    StatusCode.INTERNAL: "INTERNAL",
}
_BY_CODE: Final = {code: status for status, codes in CODES.items() for code in codes.split()}


@dataclass(frozen=True, slots=True)
class Refusal:
    status: StatusCode
    text: str

    @classmethod
    def of(cls, error: BdnError) -> Self:
        """A code of a newer service has no row: ``retryable`` decides."""
        unknown = StatusCode.UNAVAILABLE if error.transient else StatusCode.INTERNAL
        return cls(_BY_CODE.get(error.code, unknown), f"{error.code}: {printable(error.message)}"[:_LONGEST_TEXT])

    @property
    def is_final(self) -> bool:
        return self.status not in _UNCERTAIN


def mirroring(mirror: Mirror) -> str:
    if mirror.status == "PENDING":
        return "waiting for a worker of the mirror"
    if mirror.bytes_total is None:
        return "the mirror is listing the source"
    return _figures("copied to the mirror", progress_of_mirror(mirror), mirror.bytes_per_second, mirror.eta_seconds)


def staging(stage: StageDocument) -> str:
    now = progress_of_stage(stage)
    if now.bytes_total is None:
        return "the node is reading the list of files"
    return _figures("on this node", now, stage.bytes_per_second, stage.eta_seconds)


def still_waiting(source: str, step: str) -> str:
    """``hf://org/model@main: 37 of 140 GB on this node, 2.1 GB/s, about 48s more``."""
    name = printable(source)
    shown = name if len(name) <= _LONGEST_SOURCE else f"{name[: _LONGEST_SOURCE - 1]}…"
    return f"{shown}: {step}"[:LONGEST_PROGRESS]


def _figures(where: str, now: Progress, rate: float | None, eta_seconds: float | None) -> str:
    done, total = format_size(now.bytes_done), format_size(now.bytes_total or 0)
    number, _, unit = done.partition(" ")
    figures = [f"{number if total.endswith(f' {unit}') else done} of {total} {where}"]
    if rate:
        figures.append(f"{format_size(round(rate))}/s")
    if eta_seconds is not None:
        figures.append(f"about {format_duration(eta_seconds)} more")
    return ", ".join(figures)
