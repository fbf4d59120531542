"""Failures on command, so that they replay: which requests fail, how, and how often."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

Spoiling = Literal["truncate", "stall", "cut", "flip", "reset"]  # from a place in the body on


class Throttle:
    """So many bytes a second, of all answers together. ``ended_at`` is when the last bytes so far were to leave."""

    def __init__(self, bytes_per_second: float) -> None:
        self.ended_at = 0.0
        self._rate = bytes_per_second
        self._lock = Lock()

    def seconds_for(self, size: int) -> float:
        """How long an answer has to wait before it sends so many bytes more."""
        now = time.monotonic()
        with self._lock:
            self.ended_at = max(now, self.ended_at) + size / self._rate
            return self.ended_at - now


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Literal["answer", "drop", "hang", "work", "throttle", "alter", "ignore range", "shift", "gzip"] | Spoiling
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    at: int = 0  # bytes into the body
    before: Callable[[], object] | None = None  # done first
    throttle: Throttle | None = None


def answer(status: int, headers: Mapping[str, str] | None = None, body: bytes = b"scripted failure") -> Fault:
    """This answer instead of the real one."""
    return Fault("answer", status, headers or {}, body)


def rate_limited(retry_after_seconds: int) -> Fault:
    return answer(429, {"Retry-After": str(retry_after_seconds)})


def drop() -> Fault:
    """The connection closes without an answer."""
    return Fault("drop")


def hang(before: Callable[[], object] | None = None) -> Fault:
    """No answer begins, until the double is closed."""
    return Fault("hang", before=before)


def work() -> Fault:
    """The right answer, once it was said a hundred times that it is being worked on."""
    return Fault("work")


def throttled(throttle: Throttle) -> Fault:
    """The right answer, slowly."""
    return Fault("throttle", throttle=throttle)


def truncate(at: int) -> Fault:
    """The connection closes after ``at`` bytes of the body, whose length was announced in full."""
    return Fault("truncate", at=at)


def stall(at: int = 0) -> Fault:
    """Nothing more comes after ``at`` bytes of the body, until the double is told to go on or is closed."""
    return Fault("stall", at=at)


def cut(at: int = 0) -> Fault:
    """Nothing more comes after ``at`` bytes of the body, until the double is told to go on: then the connection closes."""
    return Fault("cut", at=at)


def ignore_range() -> Fault:
    """200 and the whole file to a request for a range."""
    return Fault("ignore range")


def flip_byte(at: int = 0) -> Fault:
    """One byte of the body is wrong; everything else is as announced."""
    return Fault("flip", at=at)


def reset(at: int) -> Fault:
    """The connection is torn down (RST) after ``at`` bytes of the body, without a word."""
    return Fault("reset", at=at)


def altered(headers: Mapping[str, str]) -> Fault:
    """The right answer, but with these headers instead of, or beside, its own."""
    return Fault("alter", headers=headers)


def gzipped() -> Fault:
    """The right answer, but compressed on its way, although nobody asked for that."""
    return Fault("gzip")


def right_after(deed: Callable[[], object]) -> Fault:
    """The right answer, once the deed is done: what was asked for may have changed by then."""
    return Fault("alter", before=deed)


@dataclass(slots=True)
class _Order:
    fault: Fault
    method: str | None
    path: re.Pattern[str]
    origin: str | None
    skip: int
    times: int | None


class Script:
    """Orders are tried in the sequence in which they were given; the first that fits and is not used up applies."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []
        self._lock = Lock()

    def add(
        self,
        fault: Fault,
        path: str = "",
        *,
        method: str | None = None,
        origin: str | None = None,
        skip: int = 0,
        times: int | None = 1,
    ) -> None:
        """Let requests fail whose raw path and query contain the regular expression ``path``.

        The first ``skip`` do not, and ``times`` None is all from then on; ``origin`` is such as ``hub`` or ``cdn``.
        """
        with self._lock:
            self._orders.append(_Order(fault, method, re.compile(path), origin, skip, times))

    def clear(self) -> None:
        with self._lock:
            self._orders.clear()

    def take(self, method: str, target: str, origin: str) -> Fault | None:
        with self._lock:
            for order in self._orders:
                if order.times == 0 or not order.path.search(target):
                    continue
                if order.method not in (None, method) or order.origin not in (None, origin):
                    continue
                if order.skip:
                    order.skip -= 1
                    continue
                if order.times is not None:
                    order.times -= 1
                return order.fault
        return None
