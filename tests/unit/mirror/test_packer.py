"""A parcel of small files becomes slabs: what is fetched, what an interruption leaves, and how it ends early."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from bdn.core.chunk import Digest, FileLayout, Slab, digest_of
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    ChecksumMismatchError,
    SourceChangedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Checksum, ChecksumKind, Identity, Location, UpstreamFile
from bdn.core.store import seal_of
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.upstream.budget import UpstreamRetries
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from tests.support.content.memory_store import MemoryStore

CONTENTS = {f"file-{number}": f"content of {number} ".encode() * (number + 1) for number in range(10)}
PATHS = list(CONTENTS)


class Upstream(RangedReader):
    """Serves ``CONTENTS``, unless the next thing scripted for a path says otherwise; notes what was asked."""

    def __init__(self) -> None:
        super().__init__(ConnectionPool(timeout_seconds=1))
        self.asked: list[str] = []
        self.scripted: dict[str, list[BdnError | Callable[[], None]]] = {}
        self.stated: Checksum | None = None

    def read_into(
        self, location: Location, request: RangeRequest, buffer: memoryview, is_wanted: Callable[[], bool] | None = None
    ) -> Checksum | None:
        self.asked.append(request.path)
        if scripted := self.scripted.get(request.path):
            happening = scripted.pop(0)
            if isinstance(happening, BdnError):
                raise happening
            happening()
        buffer[:] = CONTENTS[request.path]
        return self.stated


@dataclass
class Places:
    """A source that is asked for locations."""

    asked: list[str] = field(default_factory=list)

    async def locate(self, file: UpstreamFile) -> Location:
        self.asked.append(file.path)
        return Location(f"http://upstream/{file.path}?{len(self.asked)}")


class Bench:
    def __init__(self, threads: ByteThreads) -> None:
        self.store, self.upstream, self.source = MemoryStore(), Upstream(), Places()
        self.pauses: list[float] = []
        reader = UpstreamReader(self.upstream, threads, UpstreamRetries(self._pause))
        self.copier = Copier(self.store, reader)
        self.wrong: list[tuple[str, Digest]] = []
        self.packed: dict[str, tuple[FileLayout, Slab]] = {}

    async def pack(self, paths: Sequence[str] = PATHS, checksum: Checksum | None = None, scope: str = "public") -> None:
        files = [UpstreamFile(p, len(CONTENTS[p]), Identity.of(scope, p), p, "v", checksum) for p in paths]
        parcel = [LocatedFile("s3://bucket", self.source, file) for file in files]
        await self.copier.pack(parcel, self._note, self._note_wrong)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def _note(self, located: LocatedFile, layout: FileLayout, slab: Slab) -> None:
        assert located.file.path not in self.packed
        self.packed[located.file.path] = layout, slab

    async def _note_wrong(self, located: LocatedFile, kept: Digest, _: ChecksumMismatchError) -> None:
        self.wrong.append((located.file.path, kept))

    def check(self, paths: Sequence[str] = PATHS) -> set[Slab]:
        """Everything told of is in the store, and the right bytes."""
        assert list(self.packed) == list(paths)
        for path, (layout, slab) in self.packed.items():
            assert layout.slice is not None
            with self.store.open(layout.slice.slab) as file:
                content = file.read()
            assert (len(content), slab.digest) == (layout.slice.slab_size, layout.slice.slab)
            part = content[layout.slice.offset : layout.slice.offset + layout.size]
            assert part == CONTENTS[path]
            assert layout.digest == digest_of(part)
        return {slab for _, slab in self.packed.values()}


@pytest.fixture
def bench() -> Iterator[Bench]:
    threads = ByteThreads(2, "test")
    yield Bench(threads)
    threads.close()


def unavailable() -> BdnError:
    return UpstreamUnavailableError("s3://bucket", "reset")


async def test_a_parcel_becomes_one_slab_with_one_request_for_each_file(bench: Bench) -> None:
    await bench.pack()
    slabs = bench.check()
    assert [(slab.size, slab.scope) for slab in slabs] == [(sum(map(len, CONTENTS.values())), "public")]
    assert bench.upstream.asked == PATHS


async def test_a_slab_that_is_not_public_ends_in_the_seal_of_its_scope(bench: Bench) -> None:
    await bench.pack(scope="organisation:one")
    (slab,) = bench.check()
    with bench.store.open(slab.digest) as file:
        assert file.read() == b"".join(CONTENTS.values()) + seal_of("organisation:one")


async def test_an_interruption_makes_a_smaller_slab_and_nothing_is_fetched_twice(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [unavailable()]
    await bench.pack()
    assert len(bench.check()) == 2
    assert bench.upstream.asked == [*PATHS[:5], *PATHS[4:]]
    assert len(bench.pauses) == 1


async def test_a_file_that_fails_again_and_again_is_waited_for_and_then_given_up(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [unavailable() for _ in range(100)]
    with pytest.raises(UpstreamUnavailableError):
        await bench.pack()
    assert len(bench.check(PATHS[:4])) == 1
    assert 3 < bench.upstream.asked.count("file-4") < 12
    assert len(bench.pauses) == bench.upstream.asked.count("file-4") - 1


async def test_failures_between_files_that_arrive_are_waited_out_and_do_not_add_up(bench: Bench) -> None:
    for path in PATHS[1:]:
        bench.upstream.scripted[path] = [unavailable()]
    await bench.pack()
    bench.check()
    assert len(bench.pauses) == len(PATHS) - 1


async def test_a_failure_that_stays_ends_it_at_once_and_what_arrived_is_kept(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [SourceChangedError("s3://bucket", "file-4", "it is gone")]
    with pytest.raises(SourceChangedError):
        await bench.pack()
    bench.check(PATHS[:4])
    assert (bench.upstream.asked.count("file-4"), bench.pauses) == (1, [])


async def test_a_location_that_expired_is_asked_for_again_and_only_that_one(bench: Bench) -> None:
    bench.upstream.scripted["file-4"] = [LocationRefusedError("s3://bucket", "403")]
    await bench.pack()
    bench.check()
    assert [path for path in PATHS if bench.source.asked.count(path) != 1] == ["file-4"]


async def test_a_fresh_location_that_is_refused_as_well_is_a_refusal(bench: Bench) -> None:
    bench.upstream.scripted["file-0"] = [LocationRefusedError("s3://bucket", "403") for _ in range(2)]
    with pytest.raises(AuthRequiredError) as caught:
        await bench.pack()
    assert type(caught.value) is AuthRequiredError
    assert bench.packed == {}


async def test_a_file_with_the_wrong_content_is_named_and_kept_as_evidence_and_never_packed(bench: Bench) -> None:
    wrong = Checksum(ChecksumKind.SHA256, "0" * 64)
    with pytest.raises(ChecksumMismatchError, match="'file-0' of s3://bucket"):
        await bench.pack(checksum=wrong)
    kept = digest_of(CONTENTS["file-0"])
    assert (bench.packed, bench.wrong) == ({}, [("file-0", kept)] * 2)
    with bench.store.open(kept) as file:
        assert file.read() == CONTENTS["file-0"]


async def test_a_checksum_that_only_the_answer_states_is_checked(bench: Bench) -> None:
    bench.upstream.stated = Checksum(ChecksumKind.MD5, hashlib.md5(CONTENTS["file-3"]).hexdigest())
    await bench.pack(["file-3"])
    bench.check(["file-3"])
    with pytest.raises(ChecksumMismatchError):
        await bench.pack(["file-5"])


async def test_canceling_waits_for_one_file_and_not_for_the_parcel(bench: Bench) -> None:
    loop, reached, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hang() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(10)

    bench.upstream.scripted["file-2"] = [hang]
    packing = asyncio.create_task(bench.pack())
    await reached.wait()
    packing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await packing
    assert bench.upstream.asked == PATHS[:3]
