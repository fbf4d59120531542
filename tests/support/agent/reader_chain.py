"""A fill's reader whose peers, mirror and bucket are real servers that fail as a test says."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import BdnError
from bdn.net.client import DataPlane
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import BytesByTier, ChunkReader, fetch
from bdn.transfer.under_way import Arriving
from bdn.wire.heartbeat_schema import MemberDocument
from bdn.wire.location_schema import ChunkLocation, Delivery, Locations
from bdn.wire.operation_schema import Tier
from node_agent.fetch.bucket_reader import MirrorBucket
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fetch.locations import LocationLookup
from node_agent.fetch.peers import Members, Peers, Waits
from tests.doubles.faults import Fault
from tests.doubles.http_origin import Answer, Origin
from tests.fakes.clock import Clock
from tests.support.agent.rig import IMPATIENT

SIGNATURE = "5igned"
DEAD = "http://127.0.0.1:1"


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
class Locating:
    """The mirror's word of where chunks are: in ``bucket``, at addresses that nobody shall see. ``asked`` is for what.

    ``answers`` are given first, or raised.
    """

    bucket: Origin
    delivery: Delivery
    asked: list[list[Digest]] = field(default_factory=list)
    answers: list[Locations | BdnError] = field(default_factory=list)
    is_asked: threading.Event = field(default_factory=threading.Event)

    def __call__(self, _: Digest, digests: Sequence[Digest], bearer: str, __: threading.Event) -> Locations:
        assert bearer == "grant"
        self.asked.append(list(digests))
        self.is_asked.set()
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, BdnError):
                raise answer
            return answer
        return Locations(delivery=self.delivery, items=[located(self.bucket.url, digest) for digest in digests])


def located(bucket: str, digest: Digest) -> ChunkLocation:
    """As a bucket's signed addresses look."""
    url = f"{bucket}/b3/{digest.hex}?X-Amz-Signature={SIGNATURE}"
    headers = {"x-amz-checksum-mode": "ENABLED"}
    return ChunkLocation(digest=str(digest), url=url, headers=headers, expires_in_seconds=600)


@dataclass
class Bench:
    """A fill's reader with two peers, of which ``owner`` is asked first, a mirror and its bucket.

    ``instead`` counts why the mirror was asked instead of the bucket, and ``came`` the bytes of both.
    """

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
    locating: Locating
    bucket: MirrorBucket
    instead: Counter[str]
    came: Counter[str]
    arriving: Arriving = field(default_factory=Arriving)

    @property
    def store(self) -> Origin:
        """The server of the bucket."""
        return self.locating.bucket

    def fetch(self, content: bytes) -> BytesByTier:
        """The chunk, checked, and put where the node holds it."""
        buffer = memoryview(bytearray(len(content)))
        digest = digest_of(content)
        came = fetch(
            self.reader, digest, buffer, lambda: self.held.chunks.update({digest: bytes(buffer)}), self.arriving
        )
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
    store: Sequence[Fault] | None = (),
    delivery: Delivery = "proxy",
    stage_size: int = 1 << 40,
) -> Iterator[Bench]:
    """The node is no member, so that both members are asked for everything. The bucket is read with the delivery ``direct``.

    Each fault is met by one request, and the last one by all that follow. None for a source that does not listen.
    """
    digest = digest_of(content)
    members = Members("me", root / "members.json")
    routing, clock, held = Routing(lambda: [digest], members), Clock(), Held()
    peers = Peers(members, 16, clock)
    with ExitStack() as stack:
        sources = [
            stack.enter_context(_source(name, content, faults))
            for name, faults in (("owner", owner), ("second", second), ("mirror", mirror), ("store", store))
        ]
        join(members, {"a": sources[0].url, "b": sources[1].url})
        names = routing.peers(digest, lambda _: False)
        join(members, dict(zip(names, (sources[0].url, sources[1].url), strict=True)))
        pools = [ConnectionPool(timeout_seconds=20.0) for _ in range(3)]
        for pool in pools:
            stack.callback(pool.close)
        budget, mismatches = RetryBudget(stage_size, peers.avoided), list[None]()
        here, mismatched = cast("Any", held), lambda: mismatches.append(None)
        locating, instead, came = Locating(sources[3], delivery), Counter[str](), Counter[str]()
        bucket = MirrorBucket(LocationLookup(locating, clock), pools[2], 8, clock, lambda why: instead.update([why]))
        chain = ReaderChain(
            sources[2].url,
            pools[0],
            pools[1],
            here,
            peers,
            IMPATIENT,
            Waits(),
            bucket,
            mismatched,
            lambda how, size: came.update({how: size}),
        )
        chain.plane.current = DataPlane(None, delivery)
        stop = threading.Event()
        reader = chain.of_fill(FillContext(digest, "grant", routing, budget), stop)
        asked, then, last, _ = sources
        yield Bench(
            reader,
            stop,
            asked,
            then,
            last,
            clock,
            held,
            budget,
            peers,
            members,
            (names[0], names[1]),
            mismatches,
            locating,
            bucket,
            instead,
            came,
        )


@contextmanager
def _source(name: str, content: bytes, faults: Sequence[Fault] | None) -> Iterator[Origin]:
    origin = Origin(name, lambda _: Answer(200, content=content, ranged=True))
    if faults is None:
        with origin:
            pass
        origin.url = DEAD  # its own port may be given to the next source
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
