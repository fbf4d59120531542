"""A fill's reader whose peers and mirror are real sockets that do what a test says."""

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bdn.core.chunk import Digest, FileLayout, digest_of
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import BytesByTier, ChunkReader, fetch
from bdn.wire import operation_schema
from bdn.wire.layout_form import Layout
from bdn.wire.operation_schema import Tier
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.deadlines import Waits
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fetch.peers import Members, Peers
from tests.support.agent.rig import IMPATIENT, Clock
from tests.support.network.raw_server import message, partial, read_head

Play = Callable[[socket.socket, bytes, int], None]  # the connection, the chunk, and where the request begins


@dataclass
class Held:
    """What the node holds."""

    chunks: dict[Digest, bytes] = field(default_factory=dict)

    def holds(self, digest: Digest) -> bool:
        return digest in self.chunks

    def read_held(self, digest: Digest, buffer: memoryview) -> Tier | None:
        content = self.chunks.get(digest)
        if content is None:
            return None
        buffer[:] = content
        return "cluster" if digest_of(content) == digest else None


# --- what a source does with a request ---


def sends(connection: socket.socket, content: bytes, start: int) -> None:
    """What was asked for."""
    if start:
        connection.sendall(partial(content[start:], start, len(content)))
    else:
        connection.sendall(message("200 OK", f"Content-Length: {len(content)}", body=content))


def lies(connection: socket.socket, content: bytes, start: int) -> None:
    """Other bytes."""
    wrong = bytes(255 - byte for byte in content)
    sends(connection, content[:start] + wrong[start:], start)


def breaks_off(connection: socket.socket, content: bytes, start: int) -> None:
    """All but a hundredth, and then the connection's end."""
    body = content[start : start + (len(content) - start) * 99 // 100]
    head = message("206 Partial Content", f"Content-Range: bytes {start}-{len(content) - 1}/{len(content)}")
    head = head if start else message("200 OK")
    length = f"Content-Length: {len(content) - start}\r\n\r\n".encode()
    connection.sendall(head.removesuffix(b"\r\n") + length + body)
    connection.shutdown(socket.SHUT_RDWR)


def trickles(connection: socket.socket, content: bytes, start: int) -> None:
    """The first byte, and nothing more until the client goes."""
    connection.sendall(message("200 OK", f"Content-Length: {len(content) - start}", body=content[start : start + 1]))
    connection.recv(1)


def hangs(connection: socket.socket, content: bytes, start: int) -> None:
    """Nothing."""
    connection.recv(1)


def works(connection: socket.socket, content: bytes, start: int) -> None:
    """Says that it works on it, a hundred times, and then does."""
    connection.sendall(message("102 Processing") * 100)
    sends(connection, content, start)


def refuses(status: str) -> Play:
    """An answer that is none."""

    def play(connection: socket.socket, content: bytes, start: int) -> None:
        connection.sendall(message(status, "Content-Length: 2", body=b"{}"))

    return play


class Source:
    """Listens; every request is played by the next play, the last one again and again. ``starts`` is what it was asked for."""

    def __init__(self, contents: Mapping[Digest, bytes], *plays: Play) -> None:
        self.starts: list[int] = []
        self.heads: list[bytes] = []
        self._contents = contents
        self._plays = list(plays)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            for end in (self._listener, *self._open):
                with ExitStack() as quiet:
                    quiet.callback(end.close)
                    _shut(end)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while True:
                head = read_head(connection)
                content = next(body for digest, body in self._contents.items() if digest.hex.encode() in head)
                start = int(head.partition(b"Range: bytes=")[2].partition(b"-")[0] or 0)
                with self._lock:
                    self.heads.append(head)
                    self.starts.append(start)
                    play = self._plays.pop(0) if len(self._plays) > 1 else self._plays[0]
                play(connection, content, start)
        except OSError:
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@dataclass
class Bench:
    """A fill's reader with two peers, of which ``owner`` is asked first, and a mirror."""

    reader: ChunkReader
    stop: threading.Event
    owner: Source
    second: Source
    mirror: Source
    clock: Clock
    held: Held
    budget: RetryBudget
    peers: Peers
    members: Members
    names: tuple[str, str]
    mismatches: list[None]

    def fetch(self, content: bytes) -> BytesByTier:
        """The chunk, checked, and put where the node holds it."""
        buffer = memoryview(bytearray(len(content)))
        digest = digest_of(content)
        came = fetch(self.reader, digest, buffer, lambda: self.held.chunks.update({digest: bytes(buffer)}))
        assert bytes(buffer) == content
        return came


@contextmanager
def bench(
    root: Path,
    content: bytes,
    owner: tuple[Play, ...] | None,
    second: tuple[Play, ...] | None = (sends,),
    mirror: tuple[Play, ...] | None = (sends,),
    *,
    stage_size: int = 1 << 40,
) -> Iterator[Bench]:
    """The node is no member, so that both members are asked for everything. None for a source that does not listen."""
    digest = digest_of(content)
    contents = {digest: content}
    members = Members("me", root / "members.json")
    layout = Layout(digest, None, {digest: FileLayout.of(len(content), (digest,))})
    routing, clock, held = Routing(layout, members), Clock(), Held()
    peers = Peers(members, clock)
    sources = [Source(contents, *(plays or (sends,))) for plays in (owner, second, mirror)]
    with ExitStack() as stack:
        for source, plays in zip(sources, (owner, second, mirror), strict=True):
            if plays is None:
                source._listener.close()
            else:
                stack.enter_context(source.running())
        join(members, {"a": sources[0].url, "b": sources[1].url})
        names = routing.peers(digest, lambda _: False)
        join(members, dict(zip(names, (sources[0].url, sources[1].url), strict=True)))
        pools = [ConnectionPool(timeout_seconds=2.0) for _ in range(2)]
        for pool in pools:
            stack.callback(pool.close)
        budget, mismatches = RetryBudget(stage_size, peers.avoided), list[None]()
        here, mismatched = cast("Any", held), lambda: mismatches.append(None)
        chain = ReaderChain(sources[2].url, pools[0], pools[1], here, peers, IMPATIENT, Waits(), mismatched)
        stop = threading.Event()
        reader = chain.of_fill(FillContext(digest, "grant", routing, budget), stop)
        asked, then, last = sources
        yield Bench(
            reader, stop, asked, then, last, clock, held, budget, peers, members, (names[0], names[1]), mismatches
        )


def join(members: Members, addresses: Mapping[str, str]) -> None:
    """These are the members now."""
    epoch = members.current().epoch + 1
    told = [
        operation_schema.MemberDocument(node=node, advertise=url, roles=["cluster"]) for node, url in addresses.items()
    ]
    members.take(epoch, told, members.ask())
