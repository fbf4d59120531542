"""How far a mirror or a stage is, by its document."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bdn.wire.mirror_schema import TERMINAL as MIRROR_TERMINAL
from bdn.wire.mirror_schema import Mirror
from bdn.wire.stage_schema import TERMINAL as STAGE_TERMINAL
from bdn.wire.stage_schema import StageDocument


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a mirror (``mirroring``) or a stage (``staging``) is.

    ``bytes_done`` includes bytes that were held before, ``bytes_moved`` does not; both decrease when bytes have to come
    again. Totals are None until the files are known. ``is_last``: the step has ended, successfully or not.

    Example::

        client.pull("hf://org/model", "model", progress=lambda now: print(now.step, now.bytes_done, now.bytes_total))
    """

    step: Literal["mirroring", "staging"]
    bytes_done: int
    bytes_total: int | None
    bytes_moved: int
    files_total: int | None
    is_last: bool


Report = Callable[[Progress], object]


def progress_of_mirror(mirror: Mirror) -> Progress:
    moved = mirror.bytes_transferred + mirror.bytes_under_way
    is_last = mirror.status in MIRROR_TERMINAL
    return Progress("mirroring", moved + mirror.bytes_reused, mirror.bytes_total, moved, mirror.files_total, is_last)


def progress_of_stage(stage: StageDocument) -> Progress:
    under_way = sum(mount.bytes_under_way for mount in stage.mounts)
    return Progress(
        "staging",
        bytes_done=sum(mount.bytes_done for mount in stage.mounts) + under_way,
        bytes_total=total_of([mount.bytes_total for mount in stage.mounts]),
        bytes_moved=sum(mount.bytes_from.cluster + mount.bytes_from.mirror for mount in stage.mounts) + under_way,
        files_total=total_of([mount.files_total for mount in stage.mounts]),
        is_last=stage.state in STAGE_TERMINAL,
    )


def total_of(counts: list[int | None]) -> int | None:
    """The sum; None unless all of the counts are known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
