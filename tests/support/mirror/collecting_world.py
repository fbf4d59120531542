"""A mirror's database and store, real, with copies that go step by step and a collection that can be stopped at each step.

Chunks are a few bytes instead of 8 MiB; nothing that is tested here looks at their size. The clock is the world's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any, Self

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest, FileEntry, FileLayout, Manifest, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import BucketUri, parse_source
from bdn.core.store import MirrorStore, StoredChunk, split_digests
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import contents, mirrors, operations
from bdn.mirror.db.database import Database, ReadSession, WriteSession
from bdn.mirror.db.tables import ManifestRow, MirrorRow, MirrorSourceRow, OperationPartRow, OperationRow
from bdn.mirror.ingest.progress import StoredContents
from bdn.mirror.upkeep.retention import Collected, Collector, StoreEviction
from bdn.store.access import Pairs, open_access
from bdn.store.bucket import Bucket
from bdn.store.bucket_store import Abilities, BucketStore
from bdn.store.directory import DirectoryStore
from bdn.wire.operation_schema import EvictCommand, RestorationRequest
from tests.doubles.object_server import ObjectServer
from tests.support.content.bucket_stores import s3_context
from tests.support.mirror.slabs import pack, publish

TOMBSTONE_SECONDS = 100.0
GRACE_SECONDS = 30.0
# Large files as their chunks, which they share; small files as their bytes.
LARGE = {"A": (b"1", b"2"), "B": (b"1", b"3"), "C": (b"2", b"4", b"5"), "D": (b"6", b"7")}
SMALL = {"x": b"xx", "y": b"yyy", "z": b"zzzz"}
TREES = ("Ax", "ABy", "Cxyz", "yz", "B", "DB")
ORGANISATIONS = ("acme", "rival")

Gate = Callable[[str], Coroutine[Any, Any, None]]


class Killed(Exception):  # noqa: N818 - it is no error
    """The process ends here."""


async def _open_gate(_: str) -> None:
    """Nothing happens in between."""


@dataclass
class World:
    """What stays when the process is killed: the database, the store, and what was promised."""

    folder: Path
    database: Database
    now: float = 1_000_000.0
    gate: Gate = _open_gate
    copies: list[Copy] = field(default_factory=list)
    interrupted: list[Copy] = field(default_factory=list)  # by a kill; their mirrors are still to be done
    # What was promised: when each organisation gave up what it mirrored; None is that it reads it.
    promised: dict[tuple[str, str], float | None] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    store: MirrorStore = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def clock(self) -> float:
        return self.now

    def restart(self) -> None:
        """The process is gone, and the next one opens what it left."""
        self.interrupted += [copy for copy in self.copies if copy.is_known]
        self.copies.clear()
        self.store = self.opened()

    def opened(self) -> MirrorStore:
        """The store, as a process has it."""
        return _GatedStore(self.folder / "store", self)

    def files(self) -> dict[str, tuple[int, float]]:
        """What lies in the store: sizes and times."""
        files = {str(path): path.stat() for path in (self.folder / "store").rglob("*")}
        return {path: (one.st_size, one.st_mtime) for path, one in files.items() if not path.endswith("aside")}

    def close(self) -> None:
        """It ends."""
        self.store.close()

    # --- what operators do ---

    async def evict(self, organisation: str, manifest: str) -> None:
        self.now += 1
        command = EvictCommand(id=f"evi_{next(self.numbers)}", manifests=[f"b3:{manifest}"], tier="mirror")
        row = OperationRow(
            id=command.id,
            kind="eviction",
            organisation=organisation,
            status="RUNNING",
            created_at=self.now,
            request={},
            command={},
        )
        part = OperationPartRow(operation=command.id, cluster="", node=operations.MIRROR, state="PENDING", result={})
        async with self.database.write() as session:
            await operations.insert(session, row, [part])
        await self.store_eviction().run(command, organisation)
        async with self.database.read() as session:
            given_up = manifest not in await mirrors.readable(session, organisation, [manifest])
        if given_up and self.promised.get((organisation, manifest), 0.0) is None:
            self.promised[organisation, manifest] = self.now

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
        damages = Damages(self.database, self.store, self.clock, lambda: None)
        gated = _GatedDatabase(self)
        return Collector(gated, self.store, TOMBSTONE_SECONDS, damages, self.clock)  # type: ignore[arg-type]

    async def collect(
        self, *, dry_run: bool = False, grace_seconds: float = GRACE_SECONDS, only_orphans: bool = False
    ) -> Collected:
        self.now += 1
        collected = await self.collector().collect(
            grace_seconds=grace_seconds, dry_run=dry_run, only_orphans=only_orphans
        )
        await self._notice(filter(self.is_expired, self.manifests))
        return collected

    async def _notice(self, doomed: Iterable[str]) -> None:
        """What may be gone, and is, is promised no longer."""
        async with self.database.read() as session:
            for manifest in doomed:
                is_there = await session.get(ManifestRow, manifest) is not None
                if not is_there or await mirrors.is_being_collected(session, manifest):
                    for organisation in ORGANISATIONS:
                        self.promised.pop((organisation, manifest), None)

    def is_expired(self, manifest: str) -> bool:
        """Everybody gave it up, and had the time to change its mind."""
        given_up = [at for (_, name), at in self.promised.items() if name == manifest]
        return all(at is not None and at <= self.now - TOMBSTONE_SECONDS for at in given_up)

    # --- what has to be true at any time ---

    async def check(self) -> int:
        """Every chunk of what is readable or can be restored, and of what a copy counts on, is there and right."""
        checked = 0
        await self._notice(filter(self.is_expired, self.manifests))
        async with self.database.read() as session:
            for organisation, manifest in itertools.product(ORGANISATIONS, self.manifests):
                if (organisation, manifest) not in self.promised:
                    assert not await mirrors.may_read(session, organisation, manifest), "what was given up is read"
            for (organisation, manifest), given_up_at in self.promised.items():
                readable = manifest in await mirrors.readable(session, organisation, [manifest])
                assert readable == (given_up_at is None), f"{organisation} {manifest[:8]} is readable: {readable}"
                checked += await self._check_manifest(session, organisation, manifest)
        for copy in self.copies:
            for digest in copy.counted:
                self.check_object(digest)
                checked += 1
        return checked

    async def _check_manifest(self, session: ReadSession, organisation: str, manifest: str) -> int:
        row = await session.get(ManifestRow, manifest)
        assert row is not None, f"manifest {manifest[:8]} of {organisation} is gone"
        assert digest_of(row.canonical).hex == manifest
        pages = contents.layouts(session, manifest, organisation)
        found = {one.digest: one async for page in pages for one in page}
        assert found.keys() == {digest.hex for digest in self.manifests[manifest].contents}, "contents are gone"
        for one in found.values():
            if one.slab is not None:
                content = self.check_object(Digest(one.slab))[one.offset : one.offset + one.size]
                assert digest_of(content).hex == one.digest
            for raw in split_digests(one.chunks):
                self.check_object(Digest.from_bytes(raw))
        return len(found)

    def check_object(self, digest: Digest) -> bytes:
        with self.store.open(digest) as file:
            content = file.read()
        assert digest_of(content) == digest
        return content

    async def check_that_nothing_else_is_kept(self) -> None:
        async with self.database.read() as session:
            needed = set[bytes]()
            for organisation, manifest in self.promised:
                needed |= await contents.objects(session, manifest, organisation)
        assert {chunk.digest.to_bytes() for chunk in self.store.stored()} == needed

    def begin(self, organisation: str, tree: str, *, private: bool) -> Copy:
        copy = Copy(self, organisation, tree, private=private, number=next(self.numbers))
        self.copies.append(copy)
        return copy

    def take_over(self) -> Copy | None:
        """Somebody goes on with what a killed process was at."""
        if not self.interrupted:
            return None
        old = self.interrupted.pop()
        copy = Copy(self, old.organisation, old.tree, old.private, old.number, is_known=True)
        self.copies.append(copy)
        return copy


@dataclass(eq=False)
class Copy:
    """A worker that mirrors a tree, one step at a time, in the order of ``Ingest``, ``CopyMissing`` and ``Progress``."""

    world: World
    organisation: str
    tree: str
    private: bool
    number: int
    counted: set[Digest] = field(default_factory=set)  # chunks that it has put, or kept
    is_known: bool = False  # its mirror is in the database
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
        while self in self.world.copies:
            await self.step()

    async def fail(self, status: str = "FAILED") -> None:
        """It ends here, in whatever way."""
        if self in self.world.copies:
            self.world.copies.remove(self)
        if self.is_known:
            async with self.world.database.write() as session:
                await mirrors.finish(session, self._id, status, now=self.world.now)

    @property
    def _id(self) -> str:
        return f"mir_{self.number}"

    def identity(self, name: str) -> Identity:
        return Identity.of(f"organisation:{self.organisation}" if self.private else "public", name)

    async def _run(self) -> AsyncIterator[None]:
        if not self.is_known:
            await self._insert()
            yield
        for attempt in range(3):
            async for _ in self._bring_all(is_again=attempt > 0):
                yield
            if await self._publish():
                return
        await self.fail()

    async def _insert(self) -> None:
        mirror = MirrorRow(
            id=self._id,
            organisation=self.organisation,
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

    async def _bring_all(self, *, is_again: bool) -> AsyncIterator[None]:
        keys = {self.identity(name).key: name for name in self.tree}
        files = [UpstreamFile(name, 1, self.identity(name), name, "v1") for name in self.tree]
        async with self.world.database.read() as session:
            known = await contents.held(session, files, is_again=is_again)
        yield
        missing = [name for key, name in keys.items() if key not in known]
        for name in missing:
            if name in LARGE:
                async for _ in self._bring(name):
                    yield
        small = [name for name in missing if name in SMALL]
        if small:
            async for _ in self._pack(small):
                yield

    async def _bring(self, name: str) -> AsyncIterator[None]:
        world, identity = self.world, self.identity(name)
        held = StoredContents(world.database, world.store, world.clock)
        layout = await held.layout(identity)
        yield
        if layout is not None:
            self.counted.update(layout.chunks)
        else:
            layout = layout_of(name)
            half = await held.parts(identity.key)
            self.counted.update(half.values())
            yield
            for index, content in enumerate(LARGE[name]):
                if index not in half:
                    self._put(content)
                    yield
                    async with world.database.write() as session:
                        await contents.record_chunks(session, [(identity.key, index, digest_of(content))], world.now)
                    yield
        async with world.database.write() as session:
            await contents.record_contents(session, {identity.key: layout}, world.now)
            await contents.forget_chunks(session, [identity.key])
        yield

    async def _pack(self, names: list[str]) -> AsyncIterator[None]:
        scope = self.identity(names[0]).scope
        ((slab, packed, inside),) = pack([SMALL[name] for name in names], scope)
        self._put(packed)
        yield
        keys = {self.identity(name).key: layout for name, layout in zip(names, inside, strict=True)}
        async with self.world.database.write() as session:
            await contents.record_slabs(session, [slab])
            await contents.record_contents(session, keys, self.world.now)
        yield

    def _put(self, content: bytes) -> None:
        digest = digest_of(content)
        self.world.store.put(digest, bytearray(content))
        self.counted.add(digest)

    async def _publish(self) -> bool:
        manifest = manifest_of(self.tree)
        await self.world._notice([manifest.digest.hex] if self.world.is_expired(manifest.digest.hex) else [])
        async with self.world.database.write() as session:
            if await publish(session, manifest, self.world.now, self.organisation):
                return False
            await mirrors.update_source(session, self._id, 0, status="READY", manifest=manifest.digest.hex)
            await mirrors.finish(session, self._id, "READY", now=self.world.now)
        self.world.manifests[manifest.digest.hex] = manifest
        self.world.promised[self.organisation, manifest.digest.hex] = None
        return True


def layout_of(name: str) -> FileLayout:
    chunks = tuple(map(digest_of, LARGE[name]))
    return FileLayout.of((len(chunks) - 1) * CHUNK_SIZE + 1, chunks)


def manifest_of(tree: str) -> Manifest:
    entries = []
    for name in tree:
        layout = layout_of(name) if name in LARGE else FileLayout.of(len(SMALL[name]), (digest_of(SMALL[name]),))
        entries.append(FileEntry(f"{name}.bin", layout.size, layout.digest))
    return Manifest.of(entries)


@dataclass
class BucketWorld(World):
    """The same with a bucket. Its server's clock is a quarter of an hour on after each kill: nobody believes the markers of the dead."""

    server: ObjectServer = field(default_factory=ObjectServer)
    ahead: float = 0.0

    def __post_init__(self) -> None:
        self.server.__enter__()
        self.server.clock = lambda: time.time() + self.ahead
        self.objects = self.server.bucket("store")
        super().__post_init__()

    def restart(self) -> None:
        """As of every world; the connections of the dead are closed."""
        if hasattr(self, "store"):
            self.store.close()
        self.ahead += 901
        super().restart()

    def opened(self) -> MirrorStore:
        """Its listings tell nothing of when an object was kept: the world has another clock than its server."""
        return _GatedBucketStore(self)

    def files(self) -> dict[str, tuple[int, float]]:
        """Objects."""
        return {key: (len(held.content), held.written_at) for key, held in self.objects.held.items()}

    def close(self) -> None:
        """It ends."""
        super().close()
        self.server.__exit__()


class _GatedBucket(Bucket):
    """Stops when a marker is written, and on both sides of each DELETE of a chunk.

    Who waits for a collector lets it go on: he acts in the loop, at a gate where the collector stands.
    """

    def __init__(self, world: BucketWorld) -> None:
        uri = parse_source("s3://store")
        assert isinstance(uri, BucketUri)
        super().__init__(uri, open_access(uri, s3_context(world.server)), pause=self._wait)
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._waited_for = threading.Event()
        self._acting: Future[None] | None = None

    def _wait(self, _: float) -> None:
        self._waited_for.set()
        time.sleep(0.001)

    def reach(self, where: str) -> None:
        """Nobody else acts while one waits for this collector."""
        if self._world.gate is _open_gate:
            return
        self._acting = self._acting or asyncio.run_coroutine_threadsafe(self._world.gate(where), self._loop)
        self._waited_for.clear()
        while not self._acting.done() and not self._waited_for.is_set():
            time.sleep(0.0005)
        if self._acting.done():
            self.settle()

    def settle(self) -> None:
        """Until whoever acts is through."""
        acting, self._acting = self._acting, None
        if acting is not None:
            acting.result()

    def put(self, key: str, content: bytes | Buffer, headers: Pairs = (), but: tuple[int, ...] = ()) -> bool:
        is_written = super().put(key, content, headers, but)
        if key.startswith("leaving/"):
            self.reach("a marker that was written")
        return is_written

    def delete_once(self, key: str, until: float) -> bool:
        self.reach("a chunk that is about to go")
        is_known = super().delete_once(key, until)
        self.reach("a chunk that went")
        return is_known


class _GatedBucketStore(BucketStore):
    def __init__(self, world: BucketWorld) -> None:
        self._gated = _GatedBucket(world)
        super().__init__(self._gated, Abilities(), world.clock, recent_seconds=float("inf"))

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        if digests is not None:
            self._gated.reach("a look at chunks")
        return super().stored(digests)

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        gone: list[StoredChunk] = []
        for chunk in chunks:
            self._gated.reach("a chunk")
            gone += super().collect([chunk])
            self._gated.settle()
        return gone


class _GatedStore(DirectoryStore):
    """Stops before each look at chunks and, in the middle of collecting one, when it lies aside."""

    def __init__(self, root: Path, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()
        reach = self._pass

        class Watched(PosixPath):
            def rename(self, target: str | os.PathLike[str]) -> Self:
                moved = super().rename(target)
                if moved.parent.name == "aside":
                    reach("a chunk that lies aside")
                return moved

        super().__init__(Watched(root), world.clock)

    def _pass(self, where: str) -> None:
        if self._world.gate is not _open_gate:
            asyncio.run_coroutine_threadsafe(self._world.gate(where), self._loop).result()

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        if digests is not None:
            self._pass("a look at chunks")
        return super().stored(digests)

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        gone: list[StoredChunk] = []
        for chunk in chunks:
            self._pass("a chunk")
            gone += super().collect([chunk])
        return gone


@dataclass
class _GatedDatabase:
    """Stops before each transaction of the collection, and after each that writes."""

    world: World

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        return self.world.database.alone(name)

    @asynccontextmanager
    async def read(self, *, patient: bool) -> AsyncIterator[ReadSession]:
        await self.world.gate("a look at rows")
        async with self.world.database.read(patient=patient) as session:
            yield session
        await self.world.gate("rows were looked at")

    @asynccontextmanager
    async def write(self, *, patient: bool) -> AsyncIterator[WriteSession]:
        await self.world.gate("rows go")
        async with self.world.database.write(patient=patient) as session:
            yield session
        await self.world.gate("rows went")
