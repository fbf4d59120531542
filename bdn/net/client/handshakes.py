"""A connection that is given up in its TLS handshake: httpcore leaves it to nobody, and open."""

from __future__ import annotations

from typing import Any


class Handshake:
    """Closes the connection of one request that is canceled then."""

    def __init__(self) -> None:
        self._connection: Any = None

    async def __call__(self, event: str, facts: dict[str, Any]) -> None:
        """Told by the ``trace`` extension of httpcore."""
        if event == "connection.connect_tcp.complete":
            self._connection = facts["return_value"]
        elif event == "connection.start_tls.failed":
            await self._connection.aclose()
