"""Credentials that expire: cached in memory, and renewed by one caller some time before expiry."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

from bdn.core.errors import BdnError
from bdn.core.pace.retry import asked_to_wait

logger = logging.getLogger(__name__)

# Renewed when a quarter of their life is left, at most this many seconds before expiry. An address signed just before
# the renewal remains valid for minutes.
_LONGEST_MARGIN_SECONDS: Final = 300.0
_PAUSE_SECONDS: Final = 15.0  # after a failure, while the old ones are valid
_SHORTEST_SECONDS: Final = 5.0  # used at least that long, even if our clock and the issuer's disagree


class Expiring(Protocol):
    """``expires_at`` is in seconds since the epoch, None for never."""

    @property
    def expires_at(self) -> float | None: ...


Held = TypeVar("Held", bound=Expiring)


class Refreshing(Generic[Held]):
    """One set of credentials for any number of callers of one event loop, obtained at the first ``get``.

    Args:
        obtain: requests new ones, one call at a time. Its errors are mapped already.
        clock: seconds since the epoch.
        what: for the log.
    """

    def __init__(self, obtain: Callable[[], Awaitable[Held]], clock: Callable[[], float], what: str) -> None:
        self._obtain = obtain
        self._clock = clock
        self._what = what
        self._held: Held | None = None
        self._renew_at = -math.inf
        self._lock = asyncio.Lock()

    async def get(self) -> Held:
        """The credentials, the same object until they change. Called for each of a million files: usually from memory.

        While one caller renews, the other callers use the old credentials if these are valid, and wait otherwise. If
        the renewal fails with a transient error, all callers use the old credentials until they expire; if the renewing
        caller is canceled, the next caller renews.

        Raises ``BdnError``: no valid credentials, or the issuer refuses for good.
        """
        held = self._held
        if held is not None and (self._clock() < self._renew_at or (self._lock.locked() and self._lives(held))):
            return held
        async with self._lock:
            held = self._held
            if held is not None and self._clock() < self._renew_at:
                return held  # another caller renewed them
            try:
                self._held = fresh = await self._obtain()
            except BdnError as error:
                if held is None or not error.transient or not self._lives(held):
                    raise
                self._renew_at = self._clock() + max(asked_to_wait(error) or 0.0, _PAUSE_SECONDS)
                logger.warning(
                    "cannot renew credentials now; using the old ones until they expire",
                    extra={"credentials": self._what, "error": str(error)},
                )
                return held
            if fresh.expires_at is None:
                self._renew_at = math.inf
            else:
                life = fresh.expires_at - self._clock()
                margin = min(life / 4, _LONGEST_MARGIN_SECONDS)
                self._renew_at = self._clock() + max(life - margin, _SHORTEST_SECONDS)
            return fresh

    def _lives(self, held: Held) -> bool:
        return held.expires_at is None or self._clock() < held.expires_at
