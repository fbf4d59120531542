"""Each limit that callers of a mirror or an agent can reach is one for each organisation: A at its limit does not delay B."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

import pytest

from bdn.core.chunk import Buffer, ByteRange, Digest, FileLayout, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.manifest import PlacedFile
from bdn.core.store import MirrorStore
from bdn.mirror.access.access import Access
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import chunks
from bdn.mirror.serving.served_chunks import StoreShelf
from bdn.mirror.serving.served_files import OpenedFile
from bdn.net.chunk_server.receiving import BUFFERS
from bdn.net.chunk_server.served_chunks import ChunkRequest, OpenChunk, PushedChunk
from bdn.store.bucket import OPEN_AT_ONCE, Turns
from bdn.store.directory import DirectoryStore
from bdn.wire.grants import FileGrant
from bdn.wire.http_fields import chunk_path, push_path
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.support.content.bucket_stores import s3_context, store_at
from tests.support.content.memory_store import MemoryStore
from tests.support.content.shelves import Inbox, Shelf, connect, read_answer, serving
from tests.support.mirror.access_world import access_world
from tests.support.mirror.job import Job
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, until
from tests.support.services.commands import wait_until

pytest_plugins = ("tests.support.mirror.fixtures",)


# --- a store that hangs for A ---

CONTENT: Final = b"some bytes of a chunk"
CHUNK: Final = digest_of(CONTENT)
PUSH: Final = f"mir_{'0a' * 12}"
SHARE: Final = OPEN_AT_ONCE // 2


class HangingStore(MemoryStore):
    """Reads for organisation ``a`` hang until ``released``, as many as its share of memory lets in; the others are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.hanging = 0
        self._count = threading.Lock()
        self.put(CHUNK, memoryview(CONTENT))

    def hang(self) -> None:
        with self._count:
            self.hanging += 1
        assert self.released.wait(120)

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        if reader == "a":
            if self.hanging >= SHARE:
                raise StoreUnavailableError("a has its share")
            self.hang()
        return super().open(digest, reader=reader)


class HangingShelf(Shelf):
    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        return OpenChunk(self.store.open(request.digest, reader=request.organisation), 0, len(CONTENT))


@dataclass
class HangingInbox(Inbox):
    released: threading.Event = field(default_factory=threading.Event)
    hanging: list[str] = field(default_factory=list)

    def take(self, request: PushedChunk, content: memoryview) -> None:
        if request.bearer == "a":
            self.hanging.append(request.bearer)
            assert self.released.wait(120)
        super().take(request, content)


def head(first: str, organisation: str, *headers: str) -> bytes:
    lines = (f"{first} HTTP/1.1", "Host: x", f"Authorization: Bearer {organisation}", *headers, "", "")
    return "\r\n".join(lines).encode()


def test_workers__are_left_for_others_while_a_store_hangs_for_one_organisation() -> None:
    store, inbox = HangingStore(), HangingInbox()
    shelf = HangingShelf(store)
    put = f"PUT {push_path(PUSH, CHUNK)}"
    with serving(shelf, received=inbox) as server, ExitStack() as stack:
        stack.callback(inbox.released.set)
        stack.callback(store.released.set)
        for _ in range(2 * BUFFERS):
            stack.enter_context(connect(server)).sendall(head(put, "a", f"Content-Length: {len(CONTENT)}") + CONTENT)
        wait_until(lambda: len(inbox.hanging) == BUFFERS // 2)
        for _ in range(SHARE):
            stack.enter_context(connect(server)).sendall(head(f"GET {chunk_path(CHUNK)}", "a"))
        wait_until(lambda: store.hanging == SHARE)
        for request in (
            head(put, "b", f"Content-Length: {len(CONTENT)}") + CONTENT,
            head(f"GET {chunk_path(CHUNK)}", "b"),
        ):
            with connect(server) as other:
                other.sendall(request)
                assert read_answer(other)[0] in (200, 204)


class HangingLookUps(Shelf):
    """Each look-up for organisation ``a`` hangs: such as one for a chunk that it suspects, which is read first."""

    def __init__(self, store: HangingStore) -> None:
        super().__init__(store)
        self.hanging = store

    def open_chunk(self, request: ChunkRequest) -> OpenChunk:
        if request.organisation == "a":
            self.hanging.hang()
        return super().open_chunk(request)


def test_workers__are_left_for_others_while_each_look_up_of_one_organisation_hangs() -> None:
    store = HangingStore()
    with serving(HangingLookUps(store)) as server, ExitStack() as stack:
        stack.callback(store.released.set)
        crowd = [stack.enter_context(connect(server)) for _ in range(120)]
        for connection in crowd:
            connection.sendall(head(f"GET {chunk_path(CHUNK)}", "a"))
        wait_until(lambda: store.hanging >= 48)
        for _ in range(3):
            with connect(server) as other:
                other.sendall(head(f"GET {chunk_path(CHUNK)}", "b"))
                assert read_answer(other)[0] == 200
        store.released.set()
        assert [read_answer(connection)[0] for connection in crowd] == [200] * len(crowd)


@dataclass
class StepwiseStore:
    """Reads one object for each of ``permits``."""

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    order: list[Digest] = field(default_factory=list)

    def fault(self, digest: Digest) -> None:
        self.order.append(digest)
        assert self.permits.acquire(timeout=120)


async def test_suspected_chunks__are_read_round_robin_over_organisations(tmp_path: Path) -> None:
    """A suspects many chunks at once; B's only one is read in the next round."""
    store = StepwiseStore()
    async with mirror_under_test(tmp_path, work=False) as mirror, asyncio.timeout(60), asyncio.TaskGroup() as group:
        database = mirror.service.requests.database
        damages = Damages(database, cast(MirrorStore, store), database.now)
        names = [digest_of(bytes([number])) for number in range(40)]
        async with database.write() as session:
            set_id = await chunks.of(session, chunks.begin, "mir_1")
            await chunks.of(session, chunks.acquire, set_id, dict.fromkeys([*names, CHUNK], 1), database.now())
            await chunks.of(session, chunks.acquire, set_id, {}, 0.0, [*names, CHUNK])
        for name in names:
            group.create_task(damages.examine(name, "a"))
        await asyncio.sleep(0)
        group.create_task(damages.examine(CHUNK, "b"))
        await until(lambda: len(store.order) >= 4)
        store.permits.release(2)
        await until(lambda: len(store.order) >= 6)
        seen = list(store.order)
        store.permits.release(100)
    assert CHUNK in seen
    assert len(store.order) == 41


class Undamaged:
    """All chunks are right."""

    async def reason_of(self, _: Digest) -> str | None:
        return None


async def test_threads_of_the_loop__are_free_while_a_store_hangs() -> None:
    store, loop = HangingStore(), asyncio.get_running_loop()
    placed = PlacedFile("x", FileLayout.of(len(CONTENT), (CHUNK,)))
    with ThreadPoolExecutor(2 * SHARE) as threads:
        shelf = StoreShelf(store, cast(Access, None), cast(Damages, Undamaged()), loop, threads)
        file = OpenedFile(placed, store, "a", threads)
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for _ in range(SHARE // 2):
                    group.create_task(shelf.opened(ChunkRequest(CHUNK, organisation="a")))
                    group.create_task(file.begin(ByteRange(0, 1)))
                await until(lambda: store.hanging == SHARE)
                assert await asyncio.to_thread(lambda: "free") == "free"
                (await shelf.opened(ChunkRequest(CHUNK, organisation="b"))).file.close()
                store.released.set()
        finally:
            store.released.set()


# --- who reads ---


async def test_reads_of_the_store__name_the_organisation_that_reads(
    hub: Hub, upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str | None] = []
    opened = DirectoryStore.open

    def noted(store: DirectoryStore, digest: Digest, *, reader: str | None = None) -> BinaryIO:
        readers.append(reader)
        return opened(store, digest, reader=reader)

    async with access_world(tmp_path / "mirror", hub) as world:
        monkeypatch.setattr(DirectoryStore, "open", noted)
        grant = FileGrant("a", world.manifests["a-private"], "y", 4e9)
        signature = world.mirror.service.requests.signer.sign(grant)
        address = f"/files/{world.manifests['a-private']}/y?sig={signature}"
        bearer = world.bearers["grant b shared"]
        http = world.mirror.http
        for organisation, reading in (
            ("b", world.plane.get(chunk_path(world.chunks["big 1"]), headers=bearer)),
            ("b", http.get(chunk_path(world.chunks["big 1"]), headers=bearer)),
            ("b", http.get(chunk_path(world.chunks["shared slab"]), headers=bearer)),
            ("a", http.get(address)),
        ):
            readers.clear()
            assert (await reading).status_code == 200
            assert set(readers) == {organisation}


async def test_chunks_of_a_push__name_the_organisation_that_sends(
    mirror_with_data_plane: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    put = DirectoryStore.put

    def noted(store: DirectoryStore, digest: Digest, content: Buffer, *, writer: str = "") -> None:
        writers.append(writer)
        put(store, digest, content)

    monkeypatch.setattr(DirectoryStore, "put", noted)
    job = Job(mirror_with_data_plane)
    async with job.plane:
        await job.push({"model.safetensors": b"weights", "config.json": b"{}"})
    assert set(writers) == {"default"}


# --- requests to a bucket ---


def test_requests_to_a_bucket__take_the_turns_of_the_organisation_that_reads_or_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owners: list[str] = []
    turn = Turns.turn

    def noted(turns: Turns, size: int, seconds: float | None = None, owner: str = "") -> AbstractContextManager[None]:
        owners.append(owner)
        return turn(turns, size, seconds, owner)

    monkeypatch.setattr(Turns, "turn", noted)
    with ObjectServer() as server:
        server.bucket("store")
        with store_at("s3://store", s3_context(server)) as store:
            asked: tuple[tuple[str, Callable[[], object]], ...] = (
                ("a", lambda: store.put(CHUNK, memoryview(CONTENT), writer="a")),
                ("b", lambda: store.open(CHUNK, reader="b").close()),
                ("", lambda: store.fault(CHUNK)),
            )
            for organisation, asking in asked:
                owners.clear()
                asking()
                assert set(owners) == {organisation}
