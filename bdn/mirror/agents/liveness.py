"""Whether an agent lives, from when it was heard of; and whether we listened at all."""

from __future__ import annotations

from typing import Final

from bdn.mirror.db.tables import AgentRow

INTERVAL_SECONDS: Final = 10.0
# Five heartbeats with their longest waits: on a full link answers are late, and who is dropped by mistake has its chunks read
# from the mirror once more. Who is gone is found out by its peers, at their first request.
ALIVE_SECONDS: Final = 60.0
_SILENCE_SECONDS: Final = 15.0  # in which nobody at all is heard of: it is us who cannot be reached


def is_alive(row: AgentRow, now: float) -> bool:
    """Whether the agent was heard of lately, and has not said that it leaves."""
    return row.joined_at is not None and now - row.last_heartbeat < ALIVE_SECONDS


class Hearing:
    """Since when heartbeats have been coming without a break.

    A mirror or a database that was away for a minute has not heard of anybody. If that made everybody a stranger, the
    first agents to be back would be told that they are alone, and would each read everything from the mirror.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._last = now

    def heard(self, now: float) -> None:
        """A heartbeat came and was recorded."""
        if now - self._last > _SILENCE_SECONDS:
            self._since = now
        self._last = max(self._last, now)

    def may_judge(self, now: float) -> bool:
        """Whether an agent that was not heard of for ``ALIVE_SECONDS`` is silent, rather than we deaf."""
        return now - self._since >= ALIVE_SECONDS and now - self._last <= _SILENCE_SECONDS
