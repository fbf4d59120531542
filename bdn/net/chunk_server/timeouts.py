"""How long the data plane's server waits for its clients, and for its shelf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bdn.core.pace.streaming import StallPolicy

_SLOWEST: Final = StallPolicy(window_seconds=30.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """``idle_seconds`` between requests, ``head_seconds`` for one head, ``obtaining_seconds`` for a chunk that is on its way.

    A reader who takes less than ``slowest`` has stalled. The window is longer than for bodies that we read, because takings
    show up in steps: a client's kernel with a full buffer of 6 MB says nothing until a sixteenth of it is free.
    """

    idle_seconds: float = 60.0
    head_seconds: float = 10.0
    obtaining_seconds: float = 120.0
    slowest: StallPolicy = _SLOWEST
