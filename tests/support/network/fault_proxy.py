"""A proxy between two of our programs that plays faults: each exchange of HTTP meets the next fault of a script, or none.

It understands as much of HTTP/1.1 as it takes to know where a message ends. Everything runs on the loop of one thread, and what is
played depends on the order of requests alone, so that a failure replays. ``ByteProxy`` understands nothing, and passes bytes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

_Result = TypeVar("_Result")
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_PIECE: Final = 256 * 1024
_LIMIT: Final = 1024 * 1024  # of a head
_WINDOW: Final = 64  # pieces under way in one direction of one connection


@dataclass(frozen=True)
class Message:
    """A head with its empty line, and a body."""

    head: bytes
    body: bytes

    @property
    def whole(self) -> bytes:
        return self.head + self.body


@dataclass
class Exchange:
    """One request, and who asked. ``perform`` gets an answer from the other side, each time anew."""

    request: Message
    perform: Callable[[], Awaitable[Message]]
    client: asyncio.StreamWriter
    reader: asyncio.StreamReader

    @property
    def asked(self) -> str:
        """Method and path."""
        return " ".join(self.request.head.decode("latin-1").split(" ", 2)[:2])

    async def send(self, content: bytes) -> None:
        self.client.write(content)
        await self.client.drain()

    async def until_gone(self) -> None:
        """Silence: until the client gives up, or the proxy ends."""
        while await self.reader.read(_PIECE):
            pass

    def reset(self) -> None:
        """An RST instead of a FIN; what lies in the socket is lost."""
        reset(self.client)


# A fault plays one exchange; False: the connection ends with it.
Fault = Callable[[Exchange], Awaitable[bool]]


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


@dataclass
class FaultProxy:
    """``port`` of ``host`` stands for ``target``.

    ``script`` is played first, one fault per exchange whose method and path ``chosen`` likes; then ``every``, if there is one. ``met`` counts
    what was played. While ``is_parted`` nothing passes and nobody is told: neither new connections nor those that exist.
    """

    target: tuple[str, int]
    script: deque[Fault] = field(default_factory=deque)
    every: Fault | None = None
    chosen: Callable[[str], bool] = lambda _: True
    met: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0
    is_parted: bool = False
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def play(self, *faults: Fault) -> None:
        """These next, one per exchange, and nothing afterwards."""
        self.script = deque(faults)
        self.every = None

    def heal(self) -> None:
        """Nothing more is played."""
        self.play()
        self.is_parted = False

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            self.open_port()
            yield self
        finally:
            self.close_port()
            self._run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def close_port(self) -> None:
        """From now on connections are refused, and those that exist are reset."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.close)
        self.cut()

    def open_port(self) -> None:
        """Listen; again, on the same port."""
        self._server = self._run(asyncio.start_server(self._accept, self.host, self.port, limit=_LIMIT, ssl=self.tls))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Every connection is reset; new ones are let in."""
        self._run(self._cut())

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What it returns, on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    @staticmethod
    async def _end() -> None:
        """Whatever still runs on the loop is canceled."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.01)  # for the transports to close

    async def _cut(self) -> None:
        for client in list(self._clients):
            reset(client)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            await self.carry(reader, writer)
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass  # one side has gone; so does the other
        finally:
            self._clients.discard(writer)
            writer.close()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's exchanges, one after the other, each over a connection of its own to the target."""
        while True:
            request = await read_message(reader)

            async def perform(request: Message = request) -> Message:
                there, back = await asyncio.open_connection(*self.target, limit=_LIMIT)
                try:
                    back.write(request.whole)
                    await back.drain()
                    return await read_answer(there, request, writer)
                finally:
                    back.transport.abort()

            if not await self._play(Exchange(request, perform, writer, reader)):
                return

    async def _play(self, exchange: Exchange) -> bool:
        self.exchanges += 1
        fault: Fault | None = None
        if self.is_parted:
            fault = parted
        elif self.chosen(exchange.asked):
            fault = self.script.popleft() if self.script else self.every
        if fault is None:
            fault = passes
        else:
            self.met[getattr(fault, "__name__", str(fault))] += 1
        goes_on = await fault(exchange)
        if self.is_parted:
            await exchange.until_gone()
        return goes_on


async def read_message(reader: asyncio.StreamReader) -> Message:
    """A request with its body. Raises ``IncompleteReadError`` at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    return Message(head, await reader.readexactly(length_of(head) or 0))


async def read_answer(reader: asyncio.StreamReader, request: Message, client: asyncio.StreamWriter) -> Message:
    """An answer with its body; interim answers go to the client as they come."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if status >= 200:
            break
        client.write(head)
        await client.drain()
    if request.head.startswith(b"HEAD ") or status in (204, 304):
        return Message(head, b"")
    length = length_of(head)
    if length is not None:
        return Message(head, await reader.readexactly(length))
    if b"transfer-encoding: chunked" in head.lower():
        return Message(head, await _read_chunked(reader))
    return Message(head, await reader.read(-1))


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    """As it came, sizes and all."""
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if not size:
            return body


def length_of(head: bytes) -> int | None:
    """Its ``Content-Length``."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None


async def passes(exchange: Exchange) -> bool:
    """What should happen."""
    answer = await exchange.perform()
    await exchange.send(answer.whole)
    return b"connection: close" not in answer.head.lower()


async def parted(exchange: Exchange) -> bool:
    """Nothing arrives on the other side, and nothing comes back."""
    await exchange.until_gone()
    return False


@dataclass
class ByteProxy(FaultProxy):
    """As ``FaultProxy``, without a script. While it is parted, what is said on either side is taken and forgotten.

    Every byte is ``delay_seconds`` under way, and a connection ends after ``cut_after`` bytes of answers: what a kernel without
    ``netem`` cannot do to packets.
    """

    delay_seconds: float = 0
    cut_after: int = sys.maxsize
    _starts: int = 0

    def forget(self) -> None:
        """As a firewall that has started anew: nothing passes any more on a connection that is there, and nobody is told."""
        self._starts += 1

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, both ways."""
        start = self._starts
        there, back = await asyncio.open_connection(*self.target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._one_way(reader, back, start, sys.maxsize))
                group.create_task(self._one_way(there, writer, start, self.cut_after))
        except* OSError:
            pass  # one side has gone; so does the other
        finally:
            back.transport.abort()

    async def _one_way(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, start: int, limit: int) -> None:
        """Until the source ends, which ends the other way as well."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WINDOW)
        loop, carried = asyncio.get_running_loop(), 0

        async def take() -> None:
            piece = b"."
            while piece:
                piece = await source.read(_PIECE)
                await under_way.put((loop.time() + self.delay_seconds, piece))

        async with asyncio.TaskGroup() as group:
            group.create_task(take())
            while True:
                due, piece = await under_way.get()
                await asyncio.sleep(due - loop.time())
                carried += len(piece)
                if not piece or carried > limit:
                    raise ConnectionResetError
                if not self.is_parted and start == self._starts:
                    sink.write(piece)
                    await sink.drain()


@dataclass
class BalancingProxy(ByteProxy):
    """Each new connection goes to the next of ``targets`` that lets it in; when none does, it ends."""

    targets: deque[tuple[str, int]] = field(default_factory=deque)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, both ways."""
        for _ in range(len(self.targets)):
            self.target = self.targets[0]
            self.targets.rotate(-1)
            with contextlib.suppress(ConnectionRefusedError):
                await super().carry(reader, writer)
                return
