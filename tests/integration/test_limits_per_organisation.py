"""Each limit that callers of a mirror or an agent can reach is one for each organisation: A at its limit does not delay B.

``LIMITS`` names every limit in the code of both services, and the test that holds A at it while B is served, or why no
caller reaches it. A new limit fails here until it has its row.
"""

import asyncio
import re
import threading
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

_ROOT: Final = Path(__file__).parents[2]
_HERE: Final = "tests/integration/test_limits_per_organisation.py"
_FAIRNESS: Final = "tests/unit/net/test_chunk_server_fairness.py"
_QUEUE: Final = "tests/integration/test_mirror_queue.py"
_API: Final = "tests/unit/net/test_api_admission.py"
_SERVICES: Final = ("bdn/mirror", "bdn/net", "bdn/store", "bdn/transfer", "bdn/core/pace", "node_agent")
_LIMITERS: Final = re.compile(  # one that is made here or, by ``partial``, with each object
    r"\b(?:(?<=partial\()(?=\w+,)|(?=\w+(?:\[\w+\])?\())"
    r"(\w*Semaphore|CapacityLimiter|ThreadPoolExecutor|ByteThreads|OrderedLimit|\w*Shares|FairLimit|Admission|Workers)\b"
)
# By file and class: the tests that hold A at the limit, or in words why no caller is held up by another's.
LIMITS: Final = {
    ("bdn/net/chunk_server/receiving.py", "Shares"): (
        f"{_FAIRNESS}::test_slow_senders_of_one_organisation__leave_buffers_for_others",
    ),
    ("bdn/net/chunk_server/server.py", "Admission"): (
        f"{_FAIRNESS}::test_organisation_with_all_connections__loses_its_oldest_idle_one_to_others",
        f"{_FAIRNESS}::test_organisation_with_too_many_connections_at_work__is_refused_and_others_are_served",
        f"{_FAIRNESS}::test_strangers_of_one_address__make_room_for_their_own_alone",
    ),
    ("bdn/net/chunk_server/server.py", "Workers"): (
        f"{_FAIRNESS}::test_server__answers_others_while_connections_pipeline_without_pause",
        f"{_HERE}::test_workers__are_left_for_others_while_a_store_hangs_for_one_organisation",
        f"{_HERE}::test_workers__are_left_for_others_while_each_look_up_of_one_organisation_hangs",
    ),
    ("bdn/net/api_server.py", "Admission"): (
        f"{_API}::test_organisation_with_all_connections__loses_its_oldest_idle_one",
        f"{_API}::test_organisation_with_too_many_connections_at_work__is_refused_and_others_are_served",
        f"{_API}::test_strangers_of_one_address__make_room_for_their_own_alone",
    ),
    ("bdn/transfer/fair_limit.py", "Shares"): ("tests/unit/transfer/test_fair_limit.py::test_places__go_round_robin",),
    ("bdn/mirror/chunks/damages.py", "FairLimit"): (
        f"{_HERE}::test_suspected_chunks__are_read_round_robin_over_organisations",
    ),
    ("node_agent/app.py", "FairLimit"): (
        "tests/integration/test_agent_owner.py::test_chunks_for_peers__are_obtained_round_robin_over_organisations",
    ),
    ("bdn/store/bucket.py", "Shares"): (
        "tests/contract/test_bucket_store.py::test_who_gives_chunks_away_never_waits_for_room_and_the_store_has_its_own",
        f"{_HERE}::test_requests_to_a_bucket__are_sent_round_robin",
        f"{_HERE}::test_requests_to_a_bucket__take_the_turns_of_the_organisation_that_reads_or_writes",
        f"{_HERE}::test_chunks_of_a_push__name_the_organisation_that_sends",
    ),
    ("bdn/store/bucket.py", "BoundedSemaphore"): "memory of the store's own reads; reads for callers have shares",
    ("bdn/store/bucket_store.py", "ThreadPoolExecutor"): "threads of one call, which ends with them",
    ("bdn/store/copying.py", "Semaphore"): "a command of the operator",
    ("bdn/store/copying.py", "ByteThreads"): "a command of the operator",
    ("bdn/mirror/app.py", "ThreadPoolExecutor"): (
        f"{_HERE}::test_threads_of_the_loop__are_free_while_a_store_hangs",
        f"{_HERE}::test_reads_of_the_store__name_the_organisation_that_reads",
    ),
    ("bdn/mirror/serving/served_files.py", "FairLimit"): (
        "tests/unit/transfer/test_fair_limit.py::test_places__go_round_robin",
    ),
    ("bdn/mirror/operations/names.py", "FairLimit"): (
        "tests/unit/transfer/test_fair_limit.py::test_places__go_round_robin",
    ),
    ("bdn/mirror/app.py", "ByteThreads"): "threads of copies: work in the queue, below",
    (
        "bdn/mirror/ingest/worker.py",
        "Semaphore",
    ): (f"{_QUEUE}::test_worker__all_jobs_have_slow_mirrors_of_one_organisation__another_becomes_ready",),
    (
        "node_agent/app.py",
        "ByteThreads",
    ): "of stages of this node, and of chunks for peers, which have places per organisation",
    (
        "node_agent/app.py",
        "OrderedLimit",
    ): "reads of the mirror by this node: those for peers have places per organisation first",
    (
        "node_agent/fill/provision.py",
        "OrderedLimit",
    ): "of stages of this node: its user starts them, for all organisations",
    ("bdn/net/chunk_server/server.py", "Shares"): "the shares of Workers, above",
    (
        "node_agent/job/volumes.py",
        "Semaphore",
    ): "walks through job volumes of this node",
    ("node_agent/job/sync_directory.py", "ByteThreads"): "a command of one job",
    (
        "node_agent/job/volumes.py",
        "ByteThreads",
    ): "of job volumes of this node: its user makes them, for all organisations",
    ("node_agent/job/shared_caches.py", "ThreadPoolExecutor"): "of caches of this node: its user measures them",
    ("bdn/transfer/byte_threads.py", "ThreadPoolExecutor"): "the threads of ByteThreads",
    ("bdn/transfer/byte_threads.py", "Semaphore"): "the buffers of ByteThreads, one for each thread",
}
# What is limited by rows of the database and by no object of the code.
LIMITS_OF_ROWS: Final = {
    "work in the queue": (
        f"{_QUEUE}::test_claim__one_organisation_has_a_long_queue__others_are_next",
        f"{_QUEUE}::test_worker__all_jobs_have_slow_mirrors_of_one_organisation__another_becomes_ready",
    ),
    "uncommitted bytes": (
        "tests/integration/test_mirror_pushes.py::test_organisation_at_its_quota__leaves_the_quota_of_others",
    ),
}


def test_every_limit_of_the_services_has_a_row() -> None:
    found = {
        (str(file.relative_to(_ROOT)), limiter)
        for folder in _SERVICES
        for file in (_ROOT / folder).rglob("*.py")
        for limiter in _LIMITERS.findall(re.sub(r"class \w+\(.*", "", file.read_text()))
    }
    assert found == LIMITS.keys()


def test_every_row_names_tests_that_exist() -> None:
    rows = (*LIMITS.values(), *LIMITS_OF_ROWS.values())
    named = [test for row in rows if isinstance(row, tuple) for test in row]
    missing = [
        test for test in named if f"def {test.partition('::')[2]}(" not in (_ROOT / test.partition("::")[0]).read_text()
    ]
    assert missing == []


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
            await chunks.of(session, chunks.mark_stored, set_id, [*names, CHUNK])
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

    def is_right(self, _: Digest) -> bool:
        return True


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
            for organisation, asking in (
                ("a", lambda: store.put(CHUNK, memoryview(CONTENT), writer="a")),
                ("b", lambda: store.open(CHUNK, reader="b").close()),
                ("", lambda: store.held([CHUNK])),
            ):
                owners.clear()
                asking()
                assert set(owners) == {organisation}


def test_requests_to_a_bucket__are_sent_round_robin() -> None:
    """A has many requests that wait; B's only one is sent after one of them."""
    turns, order, lock = Turns("s3://bucket", 1), list[str](), threading.Lock()

    def ask(organisation: str) -> None:
        with turns.turn(1, None, organisation), lock:
            order.append(organisation)

    with ThreadPoolExecutor(12) as threads, turns.turn(1, None, "a"):
        for organisation in "aaaaaaaa":
            threads.submit(ask, organisation)
        wait_until(lambda: turns.waiting == 8)
        threads.submit(ask, "b")
        wait_until(lambda: turns.waiting == 9)
    assert order.index("b") <= 1
    assert len(order) == 9
