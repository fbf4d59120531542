"""How long somebody waits for one answer, judged while it is waited for."""

from __future__ import annotations

from typing import Final, Protocol

TICK_SECONDS: Final = 0.25  # how long a wait may go unjudged


class Patience(Protocol):
    """Is told what happens to one request; each method may raise, which ends the wait and closes the connection."""

    def waiting(self) -> None:
        """Nothing of the answer has come; said at least every tick."""
        ...

    def at_work(self) -> None:
        """An interim answer (1xx): the other side is alive and works on it."""
        ...

    def receiving(self, count: int) -> None:
        """``count`` further bytes of the body; 0 for the head, and for a tick without any."""
        ...
