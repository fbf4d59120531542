"""A fill's reader whose peers and mirror are real servers that fail as a test says."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bdn.core.chunk import Digest, FileLayout, digest_of
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import BytesByTier, ChunkReader, fetch
from bdn.wire.heartbeat_schema import MemberDocument
from bdn.wire.layout_form import Layout
from bdn.wire.operation_schema import Tier
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fetch.peers import Members, Peers, Waits
from tests.doubles.faults import Fault
from tests.doubles.http_origin import Answer, Origin
from tests.support.agent.rig import IMPATIENT, Clock


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


def starts(source: Origin) -> list[int]:
    """Where the requests that it got begin in the chunk."""
    ranges = [request.headers.get("range", "bytes=0-") for request in source.log.find()]
    return [int(one.removeprefix("bytes=").partition("-")[0]) for one in ranges]


@dataclass
class Bench:
    """A fill's reader with two peers, of which ``owner`` is asked first, and a mirror."""

    reader: ChunkReader
    stop: threading.Event
    owner: Origin
    second: Origin
    mirror: Origin
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
    owner: Sequence[Fault] | None = (),
    second: Sequence[Fault] | None = (),
    mirror: Sequence[Fault] | None = (),
    *,
    stage_size: int = 1 << 40,
) -> Iterator[Bench]:
    """The node is no member, so that both members are asked for everything.

    Each fault is met by one request, and the last one by all that follow. None for a source that does not listen.
    """
    digest = digest_of(content)
    members = Members("me", root / "members.json")
    layout = Layout(digest, None, {digest: FileLayout.of(len(content), (digest,))})
    routing, clock, held = Routing(layout, members), Clock(), Held()
    peers = Peers(members, clock)
    with ExitStack() as stack:
        sources = [
            stack.enter_context(_source(name, content, faults))
            for name, faults in (("owner", owner), ("second", second), ("mirror", mirror))
        ]
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


@contextmanager
def _source(name: str, content: bytes, faults: Sequence[Fault] | None) -> Iterator[Origin]:
    origin = Origin(name, lambda _: Answer(200, content=content, ranged=True))
    if faults is None:
        with origin:
            pass
        yield origin
        return
    for number, fault in enumerate(faults, start=1):
        origin.fail(fault, times=1 if number < len(faults) else None)
    with origin:
        yield origin


def join(members: Members, addresses: Mapping[str, str]) -> None:
    """These are the members now."""
    epoch = members.current().epoch + 1
    told = [MemberDocument(node=node, advertise=url, roles=["cluster"]) for node, url in addresses.items()]
    members.take(epoch, told, members.ask())
