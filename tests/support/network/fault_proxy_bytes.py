"""A fault proxy for protocols other than HTTP: it carries bytes, or parts, forgets, cuts and refuses."""

import asyncio

from tests.support.network.fault_proxy import FaultProxy

_PIECE = 64 * 1024


class ByteProxy(FaultProxy):
    """As ``FaultProxy``, without a script. While it is parted, what is said on either side is taken and forgotten."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts = 0

    def forget(self) -> None:
        """As a firewall that has started anew: nothing passes any more on a connection that is there, and nobody is told."""
        self._starts += 1

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, both ways."""
        start = self._starts
        there, back = await asyncio.open_connection(*self.target)
        try:
            async with asyncio.TaskGroup() as group:
                ways = [
                    group.create_task(self._one_way(reader, back, start)),
                    group.create_task(self._one_way(there, writer, start)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        except* OSError:
            pass  # one side has gone; so does the other
        finally:
            back.transport.abort()

    async def _one_way(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, start: int) -> None:
        while piece := await source.read(_PIECE):
            if not self.is_parted and start == self._starts:
                sink.write(piece)
                await sink.drain()
