"""A store is copied into another one: between all that a store can rest on, and whatever happens meanwhile. Real HTTP, real files."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import NoRoomError, StoreUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.store import MirrorStore, StoreDisk
from bdn.store.copying import CopyReport, Show, StoreCopy
from bdn.store.directory import DirectoryStore
from tests.doubles import faults
from tests.doubles.gcs import GcsServer
from tests.doubles.object_server import Objects, ObjectServer
from tests.support.content.bucket_stores import gcs_context, s3_context, store_at
from tests.support.content.memory_store import content_of

TWICE = RetryPolicy(outage_seconds=0, attempts=2)
NUMBERS = count()
CONTENTS = {digest_of(content): content for content in (b"", bytes(CHUNK_SIZE), *(b"%d" % one for one in range(40)))}
SIZE = sum(map(len, CONTENTS.values()))


def nothing_shown() -> AbstractContextManager[Show]:
    return nullcontext(lambda done, total, moved: None)


async def copied(source: MirrorStore, target: MirrorStore, *, dry_run: bool = False) -> CopyReport:
    return await StoreCopy(source, target, nothing_shown).run(dry_run=dry_run)


def fill(store: MirrorStore) -> None:
    for digest, content in CONTENTS.items():
        store.put(digest, memoryview(content))


def held(store: MirrorStore) -> dict[Digest, bytes]:
    return {chunk.digest: content_of(store, chunk.digest) for chunk in store.listed()}


# --- between all that a store can rest on ---


@pytest.mark.parametrize(("first", "second"), [
    ("directory", "objects"), ("objects", "seaweed"), ("seaweed", "gcs"), ("gcs", "directory"),
])  # fmt: skip
async def test_whatever_a_store_rests_on_all_of_it_comes_into_another_one_once(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    object_server: ObjectServer,
    shared_gcs_server: GcsServer,
    first: str,
    second: str,
) -> None:
    object_server.script.clear()

    def opened(kind: str) -> AbstractContextManager[MirrorStore]:
        name = f"copied-{next(NUMBERS)}"
        match kind:
            case "directory":
                return nullcontext(DirectoryStore(tmp_path / name))
            case "objects":
                object_server.bucket(name).page_limit = 3
                return store_at(f"s3://{name}", s3_context(object_server))
            case "gcs":
                shared_gcs_server.written_bucket(name).page_limit = 5
                return store_at(f"gs://{name}/a b", gcs_context(shared_gcs_server))
            case _:
                address, context = request.getfixturevalue("seaweed")
                return store_at(f"{address}/{name}", context)

    with opened(first) as source, opened(second) as target:
        fill(source)
        planned = await copied(source, target, dry_run=True)
        assert (planned.listed.missing_chunks, planned.listed.missing_bytes) == (len(CONTENTS), SIZE)
        assert held(target) == {}

        done = await copied(source, target)
        assert (done.chunks, done.bytes, done.listed.missing_chunks) == (len(CONTENTS), SIZE, 0)
        assert held(target) == CONTENTS
        again = await copied(source, target)
        assert (again.chunks, again.listed.chunks, again.listed.bytes) == (0, len(CONTENTS), SIZE)


# --- whatever happens meanwhile, from one bucket into another one ---


class Buckets:
    """Two on one server, and the stores in them; the first is full."""

    def __init__(self, server: ObjectServer, stack: ExitStack) -> None:
        self.server = server
        self.names = [f"copied-{next(NUMBERS)}" for _ in range(2)]
        self.first, self.second = map(server.bucket, self.names)
        server.script.clear()
        self.source, self.target = (
            stack.enter_context(store_at(f"s3://{name}", s3_context(server), TWICE)) for name in self.names
        )
        fill(self.source)
        server.log.clear()

    def path(self, bucket: Objects) -> str:
        """Of requests for its chunks."""
        return f"/{bucket.name}/b3/"

    def moved(self) -> list[int]:
        """Chunks that were read, and that were put; what is touched is put as well."""
        counts = [
            self.server.log.count(self.path(self.first), method="GET"),
            self.server.log.count(self.path(self.second), method="PUT"),
        ]
        self.server.log.clear()
        return counts


@pytest.fixture
def buckets(object_server: ObjectServer) -> Iterator[Buckets]:
    with ExitStack() as stack:
        yield Buckets(object_server, stack)


@pytest.mark.parametrize("end", ["refused", "canceled"])
async def test_a_copy_that_ended_early_goes_on_with_what_is_left(buckets: Buckets, end: str) -> None:
    place = buckets.path(buckets.second)
    running = asyncio.create_task(copied(buckets.source, buckets.target))
    if end == "refused":
        buckets.server.script.add(faults.answer(403), place, method="PUT", skip=12, times=None)
        with pytest.raises(StoreUnavailableError, match=f"s3://{buckets.second.name} answered 403"):
            await running
    else:
        loop = asyncio.get_running_loop()
        cancel = faults.right_after(lambda: loop.call_soon_threadsafe(running.cancel))
        buckets.server.script.add(cancel, place, method="PUT", skip=12)
        with pytest.raises(asyncio.CancelledError):
            await running
    buckets.server.script.clear()
    left = len(CONTENTS) - len(held(buckets.target))
    assert 0 < left <= len(CONTENTS) - 12
    buckets.moved()

    done = await copied(buckets.source, buckets.target)
    assert (buckets.moved(), done.chunks) == ([left, left], left)
    assert held(buckets.target) == CONTENTS


WRONG = digest_of(b"7")


@pytest.mark.parametrize("wrong", [b"8", b"77", b"", bytes(CHUNK_SIZE + 1), None])
async def test_a_wrong_chunk_is_named_and_all_others_are_copied(buckets: Buckets, wrong: bytes | None) -> None:
    """None: it alone cannot be read."""
    if wrong is None:
        buckets.server.script.add(faults.answer(500), f"{buckets.first.name}.*{WRONG.hex}", method="GET", times=None)
    else:
        buckets.first.overwrite(f"b3/{WRONG.fanout}", wrong)
    found = await copied(buckets.source, buckets.target)
    assert list(found.wrong) == [WRONG]
    assert found.wrong[WRONG] == buckets.source.fault(WRONG)
    assert (found.listed.missing_chunks, found.chunks) == (1, len(CONTENTS) - 1)
    assert held(buckets.target) == {digest: content for digest, content in CONTENTS.items() if digest != WRONG}

    buckets.server.script.clear()
    buckets.source.put(WRONG, memoryview(b"7"))
    repaired = await copied(buckets.source, buckets.target)
    assert (repaired.chunks, repaired.wrong, repaired.listed.missing_chunks) == (1, {}, 0)


async def test_a_chunk_that_could_not_be_read_for_a_moment_is_copied_by_the_next_round(buckets: Buckets) -> None:
    buckets.server.script.add(faults.answer(500), f"{buckets.first.name}.*{WRONG.hex}", method="GET", times=2)
    found = await copied(buckets.source, buckets.target)
    assert (found.wrong, found.chunks, held(buckets.target)) == ({}, len(CONTENTS), CONTENTS)


async def test_a_chunk_that_is_collected_meanwhile_is_not_missed(buckets: Buckets) -> None:
    fill(buckets.target)
    del buckets.second.held[f"b3/{WRONG.fanout}"]
    gone = replace(faults.answer(404), before=lambda: buckets.first.held.pop(f"b3/{WRONG.fanout}"))
    buckets.server.script.add(gone, f"{buckets.first.name}.*{WRONG.hex}", method="GET")
    found = await copied(buckets.source, buckets.target)
    assert (found.wrong, found.listed.chunks, found.listed.missing_chunks) == ({}, len(CONTENTS) - 1, 0)
    assert WRONG not in held(buckets.target)


async def test_what_comes_meanwhile_is_copied_too_and_a_mirror_that_goes_on_writing_is_not_waited_for(
    buckets: Buckets,
) -> None:
    def write() -> None:
        content = b"new %d" % next(NUMBERS)
        buckets.first.overwrite(f"b3/{digest_of(content).fanout}", content)

    listing = f"/{buckets.first.name}.*list-type.*prefix=b3"
    buckets.server.script.add(faults.right_after(write), listing, skip=1, times=3)
    assert (await copied(buckets.source, buckets.target)).listed.missing_chunks == 0
    assert held(buckets.target) == held(buckets.source)

    buckets.server.script.clear()
    buckets.server.script.add(faults.right_after(write), listing, times=None)
    found = await copied(buckets.source, buckets.target)
    assert (found.listed.missing_chunks, found.wrong) == (1, {})


async def test_what_the_other_store_has_in_part_is_replaced_and_what_it_alone_has_is_counted(buckets: Buckets) -> None:
    buckets.second.overwrite(f"b3/{WRONG.fanout}", b"77")
    buckets.second.overwrite(f"b3/{digest_of(b'stranger').fanout}", b"stranger")
    found = await copied(buckets.source, buckets.target)
    assert (found.listed.target_only, found.listed.missing_chunks) == (1, 0)
    assert held(buckets.target) == CONTENTS | {digest_of(b"stranger"): b"stranger"}


async def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    buckets: Buckets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = DirectoryStore(tmp_path / "store")
    monkeypatch.setattr(target, "disk", lambda: StoreDisk(SIZE - 1, SIZE, 0, "/small"))
    with pytest.raises(NoRoomError, match="/small"):
        await copied(buckets.source, target)
    assert held(target) == {}
    monkeypatch.setattr(target, "disk", lambda: StoreDisk(SIZE, SIZE, 0, "/small"))
    assert (await copied(buckets.source, target)).listed.missing_chunks == 0
