"""That something changed which the mirror has not heard of."""

from __future__ import annotations

import asyncio


class ChangeSignal:
    """Counts changes and wakes whoever tells them. ``tell`` is called on the event loop."""

    def __init__(self) -> None:
        self.version = 1
        self._event = asyncio.Event()

    def tell(self) -> None:
        """What this node holds, or who needs it, is another now."""
        self.version += 1
        self._event.set()

    def wake(self) -> None:
        """Nothing changed, but there is something to say."""
        self._event.set()

    async def wait(self) -> None:
        """Until there is news; several changes in a row are one."""
        await self._event.wait()
        self._event.clear()
