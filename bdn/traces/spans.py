"""Spans of mirrors and stages for OpenTelemetry. Without ``BDN_OTLP_ENDPOINT`` they cost a call that does nothing.

A service enters ``exporting`` (``bdn.traces.export``) once per process; only that imports the SDK.
Attributes are ids, digests, counts and names of sources: never a message of an error, which may hold a signed URL.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Final, Protocol

Value = str | int | float | bool
MOST_BATCHES: Final = 32  # spans of one copy or fill


class Span(Protocol):
    def set(self, **attributes: Value) -> None:
        """Add attributes; ``bytes`` becomes ``bdn.bytes``."""


class Tracer(Protocol):
    """What ``bdn.traces.otlp`` implements. ``parent`` is a ``traceparent`` (W3C Trace Context) or None."""

    def span(
        self, name: str, attributes: dict[str, Value], *, parent: str | None, is_entry: bool, is_request: bool
    ) -> AbstractContextManager[Span]: ...

    def record(self, name: str, began: int, attributes: dict[str, Value]) -> None:
        """A span from ``began``, in nanoseconds since the epoch, until now."""

    def traceparent(self) -> str | None: ...


class _NoSpan:
    def set(self, **_: Value) -> None:
        pass


NO_SPAN: Final = _NoSpan()
_NOTHING: Final[AbstractContextManager[Span]] = nullcontext(NO_SPAN)
_ACTIVE: Final[list[Tracer]] = []  # at most one: a process has one exporter


def span(name: str, **attributes: Value) -> AbstractContextManager[Span]:
    """A step of the work at hand, as a child of the current span."""
    return _span(name, attributes)


def work(name: str, parent: str | None = None, **attributes: Value) -> AbstractContextManager[Span]:
    """A piece of work with a bound of its own on the number of spans: a mirror, or a stage.

    ``parent`` is the ``traceparent`` of its request, which may have come to another process. None: the current span.
    """
    return _span(name, attributes, parent=parent, is_entry=True)


def request(name: str, parent: str | None, **attributes: Value) -> AbstractContextManager[Span]:
    """A request that this service answers, of an authenticated caller. ``parent`` is its header ``traceparent``."""
    return _span(name, attributes, parent=parent, is_entry=True, is_request=True)


def joined(name: str, parent: str | None, **attributes: Value) -> AbstractContextManager[Span]:
    """``request``, if it belongs to a trace of its caller: for requests that are too many to begin traces."""
    return _NOTHING if parent is None else request(name, parent, **attributes)


def _span(
    name: str,
    attributes: dict[str, Value],
    *,
    parent: str | None = None,
    is_entry: bool = False,
    is_request: bool = False,
) -> AbstractContextManager[Span]:
    if not _ACTIVE:
        return _NOTHING
    return _ACTIVE[0].span(name, attributes, parent=parent, is_entry=is_entry, is_request=is_request)


def traceparent() -> str | None:
    """The header that continues the current trace in another program; None outside of traces."""
    return _ACTIVE[0].traceparent() if _ACTIVE else None


class Batches:
    """Spans for parts that many tasks complete, one span after the other, ``MOST_BATCHES`` at most.

    Each covers the time in which a share of the bytes was completed, and is a child of the span in which the batches
    began: a stage may wait for parts that the tasks of another one complete. Add on the event loop only.
    """

    def __init__(self, tracer: Tracer, name: str, total: int) -> None:
        self._tracer = tracer
        self._context = copy_context()
        self._name = name
        self._share = max(1, -(-total // MOST_BATCHES))
        self._left = MOST_BATCHES
        self._begin()

    def _begin(self) -> None:
        self._began = time.time_ns()
        self._bytes = self._parts = 0
        self._by: dict[str, int] = {}

    def add(self, size: int, kind: str = "") -> None:
        """Count a part; ``kind`` is counted on its own, too."""
        self._bytes += size
        self._parts += 1
        if kind:
            self._by[kind] = self._by.get(kind, 0) + size
        if self._bytes >= self._share and self._left > 1:
            self._record()

    def end(self) -> None:
        """Record the last one; parts that are added later are not counted."""
        if self._parts:
            self._record()
        self._left = 0

    def _record(self) -> None:
        self._left -= 1
        counts: dict[str, Value] = {"bytes": self._bytes, "parts": self._parts}
        counts |= {f"from_{kind}": size for kind, size in self._by.items()}
        self._context.run(self._tracer.record, self._name, self._began, counts)
        self._begin()


class Counted(Protocol):
    def add(self, size: int, kind: str = "") -> None: ...


class _NoBatches:
    def add(self, size: int, kind: str = "") -> None:
        pass


NO_BATCHES: Final[Counted] = _NoBatches()


@contextmanager
def batches(name: str, total: int) -> Iterator[Counted]:
    """Children of the current span for work in parts of ``total`` bytes in all."""
    if not _ACTIVE:
        yield NO_BATCHES
        return
    counted = Batches(_ACTIVE[0], name, total)
    try:
        yield counted
    finally:
        counted.end()


@contextmanager
def active(tracer: Tracer) -> Iterator[None]:
    """Spans of this process are the tracer's until the block ends."""
    _ACTIVE.append(tracer)
    try:
        yield
    finally:
        _ACTIVE.remove(tracer)
