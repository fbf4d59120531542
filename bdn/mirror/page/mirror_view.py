"""A mirror as the page shows it: bars, rate, time left, slowest source, and errors with their remedies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.units import counted, format_duration, format_size, format_time
from bdn.mirror.page.remedies import Problem, problem_of
from bdn.wire.mirror_schema import TERMINAL, Mirror, MirrorSource, MirrorStatus

_RANK: Final[dict[MirrorStatus, int]] = {"SYNCING": 0, "PENDING": 1, "FAILED": 2, "CANCELED": 3, "READY": 3}
_LISTED_SOURCES: Final = 3  # of one mirror in the list; a mirror may have 256


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One source of a mirror. ``percent`` is None until its files are known."""

    source: str
    mount: str
    status: MirrorStatus
    revision: str | None
    manifest: str | None
    percent: int | None
    bytes: str
    warnings: tuple[str, ...]
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class MirrorView:
    """``slowest`` is the source that is furthest from its end; None unless several are not READY."""

    id: str
    status: MirrorStatus
    is_running: bool
    percent: int | None
    bytes: str
    rate: str | None
    left: str | None
    created: str
    took: str | None
    files: str | None
    sources: tuple[SourceLine, ...]
    hidden: int
    slowest: SourceLine | None
    problem: Problem | None

    @property
    def key(self) -> str:
        """An id for an element of the page."""
        return self.id.replace("_", "-")


def mirror_view(mirror: Mirror, *, listed: int | None = None) -> MirrorView:
    """``listed``: show so many sources; None shows all."""
    lines = [_line(source, mirror.status) for source in mirror.sources]
    shown = lines if listed is None else lines[:listed]
    created, ended = mirror.created_at.timestamp(), mirror.completed_at
    done = mirror.bytes_transferred + mirror.bytes_under_way + mirror.bytes_reused
    is_running = mirror.status not in TERMINAL
    return MirrorView(
        id=mirror.id,
        status=mirror.status,
        is_running=is_running,
        percent=_percent(done, mirror.bytes_total, is_ready=mirror.status == "READY"),
        bytes=_bytes(done, mirror.bytes_total),
        rate=f"{format_size(int(mirror.bytes_per_second))}/s" if mirror.bytes_per_second and is_running else None,
        left=None if mirror.eta_seconds is None else format_duration(mirror.eta_seconds),
        created=format_time(created),
        took=None if ended is None else format_duration(ended.timestamp() - created),
        files=None if mirror.files_total is None else counted(mirror.files_total, "file"),
        sources=tuple(shown),
        hidden=len(lines) - len(shown),
        slowest=_slowest(mirror.sources, lines) if is_running else None,
        problem=problem_of(mirror.error),
    )


def listed_mirrors(mirrors: Iterable[Mirror]) -> list[MirrorView]:
    """For the list: running ones first, then failed ones; each group as given."""
    views = [mirror_view(mirror, listed=_LISTED_SOURCES) for mirror in mirrors]
    return sorted(views, key=lambda view: _RANK[view.status])


def _line(source: MirrorSource, status: MirrorStatus) -> SourceLine:
    done = source.bytes_transferred + source.bytes_under_way + source.bytes_reused
    return SourceLine(
        source=source.source,
        mount=source.mount_location,
        status="CANCELED" if status == "CANCELED" and source.status not in TERMINAL else source.status,
        revision=source.resolved_revision,
        manifest=source.manifest,
        percent=_percent(done, source.bytes_total, is_ready=source.status == "READY"),
        bytes=_bytes(done, source.bytes_total),
        warnings=tuple(source.warnings),
        problem=problem_of(source.error),
    )


def _slowest(sources: Sequence[MirrorSource], lines: Sequence[SourceLine]) -> SourceLine | None:
    """The one with the smallest part done; while none is known, the one with most bytes left."""
    open_ones = [number for number, source in enumerate(sources) if source.status not in TERMINAL]
    if len(open_ones) < 2:
        return None
    return lines[min(open_ones, key=lambda number: _order(sources[number]))]


def _order(source: MirrorSource) -> tuple[float, int]:
    done = source.bytes_transferred + source.bytes_under_way + source.bytes_reused
    total = source.bytes_total or 0
    return (done / total if total else 0.0), done - total


def _percent(done: int, total: int | None, *, is_ready: bool) -> int | None:
    """Below 100 until it is READY: bytes that are under way may have to come again."""
    if is_ready:
        return 100
    if total is None:
        return None
    return min(99, 100 * done // total) if total else 0


def _bytes(done: int, total: int | None) -> str:
    return format_size(done) if total is None else f"{format_size(done)} of {format_size(total)}"
