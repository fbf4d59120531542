"""A mirror's database and store, real, with copies that go step by step and a collection that can be stopped at each step.

Chunks are a few bytes instead of 8 MiB; nothing that is tested here looks at their size. The clock is the world's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import select

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.manifest import ManifestWriter, Root, large_file, slab_layouts
from bdn.core.store import NotDeletedError
from bdn.mirror.db import chunks, manifests, mirrors, operations
from bdn.mirror.db.chunks import DELETE_SECONDS, ChunkState
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.tables import ChunkRow, MirrorRow, MirrorSourceRow
from bdn.mirror.upkeep.collection import Collected, Collector
from bdn.mirror.upkeep.eviction import StoreEviction
from bdn.store.directory import DirectoryStore
from bdn.wire.operation_schema import EvictCommand, RestorationRequest

TOMBSTONE_SECONDS = 10_000.0
GRACE_SECONDS = 3000.0
# Large files as their chunks, which they share; small files as their bytes, which lie in one slab.
LARGE = {"A": (b"1", b"2"), "B": (b"1", b"3"), "C": (b"2", b"4", b"5"), "D": (b"6", b"7")}
SMALL = {"x": b"xx", "y": b"yyy", "z": b"zzzz"}
TREES = ("Ax", "ABy", "Cxyz", "yz", "B", "DB")
ORGANISATIONS = ("acme", "rival")
_WAITS = 3  # steps in which a copy that waits for a chunk lets others act

Gate = Callable[[str], Coroutine[Any, Any, None]]


class Killed(Exception):  # noqa: N818 - it is no error
    """The process ends here."""


async def _open_gate(_: str) -> None:
    """Nothing happens in between."""


@cache
def tree_of(tree: str) -> tuple[Root, dict[Digest, bytes]]:
    """Its manifest, and the content of all chunks that this names."""
    writer, content = ManifestWriter(), dict[Digest, bytes]()
    placed = []
    for name in filter(LARGE.__contains__, tree):
        names = tuple(map(digest_of, LARGE[name]))
        content |= zip(names, LARGE[name], strict=True)
        placed.append(large_file(name, (len(names) - 1) * CHUNK_SIZE + 1, names))
    if small := [(name, SMALL[name]) for name in tree if name in SMALL]:
        slab = b"".join(one for _, one in small)
        content[digest_of(slab)] = slab
        inside = [(name, len(one), digest_of(one)) for name, one in small]
        placed += slab_layouts(inside, digest_of(slab), len(slab))
    documents = [page for file in sorted(placed, key=lambda one: one.path) for page in writer.add(file)] + list(
        writer.finish()
    )
    return writer.root, content | {one.digest: one.content for one in documents}


@dataclass
class World:
    """What stays when the process is killed: the database, the store, and what was promised.

    ``unanswered``: so many deletions more get no answer, and the store carries each out later, or never, until its signature expires.
    """

    folder: Path
    database: Database
    now: float = 1_000_000.0
    gate: Gate = _open_gate
    copies: list[Copy] = field(default_factory=list)
    interrupted: list[Copy] = field(default_factory=list)  # by a kill; their mirrors are still to be done
    # What was promised: when each organisation gave up what it mirrored; None is that it reads it.
    promised: dict[tuple[str, str], float | None] = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)  # trees by their manifests
    numbers: Iterator[int] = field(default_factory=itertools.count)
    unanswered: int = 0
    under_way: list[tuple[Digest, float]] = field(default_factory=list)  # deletions, and when they have expired
    store: _GatedStore = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def clock(self) -> float:
        return self.now

    def restart(self) -> None:
        """The process is gone, and the next one opens what it left."""
        self.interrupted += [copy for copy in self.copies if copy.is_known]
        self.copies.clear()
        self.store = _GatedStore(self.folder / "store", self)

    def carry_out(self) -> None:
        """The store carries out what it gave no answer to, as far as that has not expired."""
        late, self.under_way = self.under_way, []
        for digest, until in late:
            if self.now < until:
                self.store.delete_now([digest])

    def files(self) -> dict[str, tuple[int, float]]:
        """What lies in the store: sizes and times."""
        files = {str(path): path.stat() for path in (self.folder / "store").rglob("*")}
        return {path: (one.st_size, one.st_mtime) for path, one in files.items()}

    # --- what operators do ---

    async def evict(self, organisation: str, manifest: str, *, purge: bool = False) -> None:
        self.now += 1
        command = EvictCommand(id=f"evi_{next(self.numbers)}", manifests=[f"b3:{manifest}"], tier="mirror", purge=purge)
        part = {("", operations.MIRROR): "PENDING"}
        async with self.database.write() as session:
            await operations.insert(
                session, command.id, "eviction", part, self.now, organisation=organisation, request={}, command={}
            )
        try:
            await self.store_eviction().run(command, organisation)
        finally:
            async with self.database.read() as session:
                given_up = manifest not in await mirrors.readable(session, organisation, [manifest])
            if given_up and (purge or self.promised.get((organisation, manifest), 0.0) is None):
                self.promised[organisation, manifest] = 0.0 if purge else self.now
                await self._notice(filter(self.is_expired, self.manifests))

    async def restore(self, organisation: str, manifest: str) -> None:
        self.now += 1
        given_up_at = self.promised.get((organisation, manifest))
        try:
            await self.store_eviction().restore(RestorationRequest(manifest=f"b3:{manifest}"), organisation)
        except NotFoundError:
            assert given_up_at is None or self.is_expired(manifest), "what could be restored was not"
        else:
            self.promised[organisation, manifest] = None

    def store_eviction(self) -> StoreEviction:
        return StoreEviction(self.database, self.collector(), TOMBSTONE_SECONDS, self.clock)

    def collector(self) -> Collector:
        return Collector(_GatedDatabase(self), self.store, TOMBSTONE_SECONDS, self.clock)  # type: ignore[arg-type]

    async def collect(
        self, *, dry_run: bool = False, grace_seconds: float = GRACE_SECONDS, only_orphans: bool = False
    ) -> Collected:
        self.now += 1
        collector = self.collector()
        try:
            return await collector.collect(grace_seconds=grace_seconds, dry_run=dry_run, only_orphans=only_orphans)
        finally:
            await self._notice(filter(self.is_expired, self.manifests))

    async def _notice(self, doomed: Iterable[str]) -> None:
        """What may be gone, and is, is promised no longer."""
        doomed = list(doomed)
        async with self.database.read() as session:
            there = await manifests.set_ids(session, doomed)
        for manifest in doomed:
            if manifest not in there:
                for organisation in ORGANISATIONS:
                    self.promised.pop((organisation, manifest), None)

    def is_expired(self, manifest: str) -> bool:
        """Everybody gave it up, and had the time to change its mind."""
        given_up = [at for (_, name), at in self.promised.items() if name == manifest]
        return all(at is not None and at <= self.now - TOMBSTONE_SECONDS for at in given_up)

    # --- what has to be true at any time ---

    async def check(self) -> int:
        """Every chunk of what is readable or can be restored, and of what a copy counts on, is there and right; no object lacks a row."""
        checked = 0
        await self._notice(filter(self.is_expired, self.manifests))
        async with self.database.read() as session:
            for organisation, manifest in itertools.product(ORGANISATIONS, self.manifests):
                if (organisation, manifest) not in self.promised:
                    assert not await mirrors.may_read(session, organisation, manifest), "what was given up is read"
            for (organisation, manifest), given_up_at in self.promised.items():
                readable = manifest in await mirrors.readable(session, organisation, [manifest])
                assert readable == (given_up_at is None), f"{organisation} {manifest[:8]} is readable: {readable}"
                checked += await check_manifest(session, self.store, manifest, self.manifests[manifest])
            stored = {one.digest for one in self.store.listed()} & _ALL
            assert stored <= (await chunks.of(session, chunks.known, stored)).keys(), "an object has no row"
        for copy in self.copies:
            for digest in copy.counted:
                check_object(self.store, digest)
                checked += 1
        return checked

    async def check_that_nothing_else_is_kept(self) -> None:
        """Neither objects nor rows."""
        needed = {digest for _, manifest in self.promised for digest in tree_of(self.manifests[manifest])[1]}
        async with self.database.read() as session:
            rows = {Digest.from_bytes(raw) for raw in (await session.execute(select(ChunkRow.digest))).scalars()}
        assert ({one.digest for one in self.store.listed()}, rows) == (needed, needed)

    def begin(self, organisation: str, tree: str) -> Copy:
        copy = Copy(self, organisation, tree, number=next(self.numbers))
        self.copies.append(copy)
        return copy

    def take_over(self) -> Copy | None:
        """Another worker goes on with what a killed process was at."""
        if not self.interrupted:
            return None
        old = self.interrupted.pop()
        copy = Copy(self, old.organisation, old.tree, old.number, is_known=True)
        self.copies.append(copy)
        return copy


_ALL = frozenset(digest for tree in TREES for digest in tree_of(tree)[1])


async def check_manifest(session: ReadSession, store: DirectoryStore, manifest: str, tree: str) -> int:
    """The manifest refers to all its chunks, and each is stored and right."""
    found = await manifests.set_ids(session, [manifest])
    assert found, f"manifest {manifest[:8]} is gone"
    needed = tree_of(tree)[1].keys()
    states = select(ChunkRow.state).where(ChunkRow.digest.in_([digest.to_bytes() for digest in needed]))
    assert set((await session.execute(states)).scalars()) == {ChunkState.STORED}
    assert (await chunks.of(session, chunks.stored, needed, found.values())).keys() == needed, "chunks are gone"
    for digest in needed:
        check_object(store, digest)
    return len(needed)


def check_object(store: DirectoryStore, digest: Digest) -> None:
    with store.open(digest) as file:
        assert digest_of(file.read()) == digest


@dataclass(eq=False)
class Copy:
    """A worker that mirrors a tree, one step at a time, in the order of ``Ingest`` and ``SetWriter``. One of an odd number is a push."""

    world: World
    organisation: str
    tree: str
    number: int
    counted: set[Digest] = field(default_factory=set)  # chunks that are stored, and its set refers to
    is_known: bool = False  # its mirror is in the database
    is_waiting: bool = False  # for a chunk that leaves
    _steps: AsyncIterator[None] | None = None

    async def step(self) -> None:
        """One more, unless it has ended."""
        self.world.now += 1
        self._steps = self._steps or self._run()
        try:
            await anext(self._steps)
        except StopAsyncIteration:
            if self in self.world.copies:
                self.world.copies.remove(self)

    async def finish(self) -> None:
        """To its end, or until it has to wait for others."""
        waits = 0
        while self in self.world.copies and waits < _WAITS:
            await self.step()
            waits = waits + 1 if self.is_waiting else 0

    async def fail(self) -> None:
        """It ends here."""
        if self in self.world.copies:
            self.world.copies.remove(self)
        if self.is_known:
            async with self.world.database.write() as session:
                await mirrors.finish(session, self._id, "FAILED", now=self.world.now)

    @property
    def _id(self) -> str:
        return f"mir_{self.number}"

    @property
    def _owner(self) -> str:
        return self._id if self.number % 2 else f"{self._id}/0"

    async def _run(self) -> AsyncIterator[None]:
        database = self.world.database
        if not self.is_known:
            await self._insert()
            yield
        async with database.write() as session:
            set_id = await chunks.of(session, chunks.begin, self._owner)
        yield
        root, content = tree_of(self.tree)
        if self.number % 3:  # what it knows to be stored, it holds
            async with database.write() as session:
                self.counted |= (await chunks.of(session, chunks.hold, set_id, content)).keys()
            yield
        for digest in [one for one in content if one not in self.counted]:
            async for _ in self._bring(set_id, digest, content[digest]):
                yield
        await self._publish(set_id, root)

    async def _bring(self, set_id: int, digest: Digest, content: bytes) -> AsyncIterator[None]:
        world = self.world
        while True:
            async with world.database.write() as session:
                found = await chunks.of(session, chunks.acquire, set_id, {digest: len(content)}, world.now)
            self.is_waiting = digest in found.leaving
            if not self.is_waiting:
                break
            yield
        if digest in found.put:
            yield
            world.store.put(digest, bytearray(content))
            yield
            async with world.database.write() as session:
                await chunks.of(session, chunks.acquire, set_id, {}, 0.0, [digest])
        self.counted.add(digest)
        yield

    async def _insert(self) -> None:
        mirror = MirrorRow(
            id=self._id,
            organisation=self.organisation,
            team="",
            request_key=self._id,
            status="SYNCING",
            created_at=self.world.now,
            started_at=self.world.now,
        )
        source = MirrorSourceRow(
            mirror_id=self._id,
            organisation=self.organisation,
            position=0,
            request={},
            source=f"hf://org/{self.tree}",
            mount_location="/m",
            status="SYNCING",
            warnings=[],
        )
        async with self.world.database.write() as session:
            session.add(mirror)
            await session.flush()
            session.add(source)
        self.is_known = True

    async def _publish(self, set_id: int, root: Root) -> None:
        name, world = root.digest.hex, self.world
        if world.is_expired(name):
            await world._notice([name])
        async with world.database.write() as session:
            await manifests.publish(session, set_id, root, world.now)
            await mirrors.lift_tombstone(session, self.organisation, name)
            await mirrors.update_source(session, self._id, 0, status="READY", manifest=name)
            await mirrors.finish(session, self._id, "READY", now=world.now)
        world.manifests[name] = self.tree
        world.promised[self.organisation, name] = None


class _GatedStore(DirectoryStore):
    """Stops before and after each chunk that a collection deletes."""

    def __init__(self, root: Path, world: World) -> None:
        super().__init__(root)
        self._world = world
        self._loop = asyncio.get_running_loop()

    def _pass(self, where: str) -> None:
        if self._world.gate is not _open_gate:
            asyncio.run_coroutine_threadsafe(self._world.gate(where), self._loop).result()

    def delete_now(self, digests: Collection[Digest]) -> None:
        """Past gates and faults."""
        super().delete(digests)

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        left: set[Digest] = set()
        for digest in digests:
            self._pass("a chunk is about to go")
            if self._world.unanswered:
                self._world.unanswered -= 1
                self._world.under_way.append((digest, self._world.now + DELETE_SECONDS))
                left.add(digest)
            else:
                super().delete([digest], began=began)
            self._pass("a chunk went")
        if left:
            raise NotDeletedError("no answer", frozenset(left))


@dataclass
class _GatedDatabase:
    """Stops before each transaction of the collection, and after each."""

    world: World

    @asynccontextmanager
    async def read(self, *, patient: bool = False) -> AsyncIterator[ReadSession]:
        await self.world.gate("a look at rows")
        async with self.world.database.read(patient=patient) as session:
            yield session
        await self.world.gate("rows were looked at")

    @asynccontextmanager
    async def write(self, *, patient: bool = False) -> AsyncIterator[WriteSession]:
        await self.world.gate("rows go")
        async with self.world.database.write(patient=patient) as session:
            yield session
        await self.world.gate("rows went")
