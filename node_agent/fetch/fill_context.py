"""What the readers of one stage share: whose right it has, whose its chunks are, and what it may still spend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.pace.retry import Allowance
from bdn.core.ring.hedging import HedgeBudget
from bdn.wire.stage_schema import Transfer
from node_agent.fetch.routing import Routing

_FREE_FAILURES: Final = 64  # a mirror that restarts fails all threads at once, several times
_CHUNK_SIZE_PER_FAILURE: Final = 10 * 8 * 1024**2


class RetryBudget:
    """What one stage may still spend on sources that fail or are late. Shared by all its threads.

    One budget of retries, and one of bytes that are asked for again because their first source was late.
    """

    def __init__(self, size: int, avoided: Callable[[], Sequence[str]]) -> None:
        """For a stage that is to fetch ``size`` bytes. ``avoided`` names the peers that are avoided now."""
        self._retries = Allowance(_FREE_FAILURES + size // _CHUNK_SIZE_PER_FAILURE)
        self._hedges = HedgeBudget(size)
        self._avoided = avoided
        self._lock = threading.Lock()

    def retry(self) -> bool:
        """One more failure; False when there were too many, and the stage shall fail with the last one."""
        with self._lock:
            return self._retries.spend()

    def hedge(self, size: int) -> bool:
        """Whether so many bytes may be asked for again elsewhere."""
        with self._lock:
            return self._hedges.take(size)

    def document(self) -> Transfer:
        """The figures, for people."""
        with self._lock:
            return Transfer(
                retries=self._retries.used,
                retries_left=self._retries.left,
                bytes_hedged=self._hedges.used,
                peers_avoided=list(self._avoided()),
            )


@dataclass(frozen=True)
class FillContext:
    """The chunks of ``manifest`` are read with the grant ``bearer``.

    ``is_ending`` tells whether no chunk is left to be asked of peers but those that are being asked for.
    """

    manifest: Digest
    bearer: str
    routing: Routing
    budget: RetryBudget
    is_ending: Callable[[], bool] = lambda: False
