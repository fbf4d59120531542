"""What a commit says of files has to be what the chunks of the push hold."""

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.mirror.db.manifests import DocumentDamagedError
from bdn.mirror.jobs.commits import check_slab, chunk_sizes, placed_files, slabs_of
from bdn.wire.push_schema import PushedFile
from tests.support.content.memory_store import MemoryStore


def name_of(content: bytes) -> str:
    return str(digest_of(content))


def small(path: str, content: bytes, offset: int | None, slab: bytes = b"ab") -> PushedFile:
    return PushedFile(path=path, size=len(content), digest=name_of(content), slab=name_of(slab), offset=offset)


def large(path: str, size: int, *chunks: bytes) -> PushedFile:
    return PushedFile(path=path, size=size, chunks=[name_of(chunk) for chunk in chunks])


def test_placed_files__in_any_order__are_sorted_and_know_their_chunks() -> None:
    files = [large("x", CHUNK_SIZE + 1, b"1", b"2"), small("z", b"b", 1), large("nothing", 0), small("a", b"a", 0)]

    placed = placed_files(files, 4)

    assert [file.path for file in placed] == ["a", "nothing", "x", "z"]
    assert chunk_sizes(placed) == {digest_of(b"ab"): 2, digest_of(b"1"): CHUNK_SIZE, digest_of(b"2"): 1}
    assert slabs_of(placed) == {digest_of(b"ab"): {(0, 1, digest_of(b"a")), (1, 1, digest_of(b"b"))}}


def test_placed_files__two_slabs_with_equal_bytes__are_one_chunk() -> None:
    placed = placed_files([small(path, b"ab", 0) for path in ("a", "b")], 2)
    assert chunk_sizes(placed) == {digest_of(b"ab"): 2}


@pytest.mark.parametrize("files", [
    [small("x", b"b", 1)],
    [small("x", b"a", 0), small("y", b"b", 2)],
    [small("x", b"ab", 0), small("y", b"b", 1)],
    [small("x", b"b", 1), small("y", b"a", 0)],
    [small("x", b"a", 0), small("y", b"b", 1, b"other")],
    [small("x", b"a", None)],
    [PushedFile(path="x", size=1, chunks=[name_of(b"a")])],
    [PushedFile(path="x", size=CHUNK_SIZE, digest=name_of(b"a"), slab=name_of(b"a"), offset=0)],
    [large("x", CHUNK_SIZE)],
    [large("../x", 0)],
    [large("x", 0), large("x", 0)],
    [large("x", 0), large("x/y", 0)],
], ids=[
    "begins behind a gap", "a gap", "overlapping", "out of order", "another slab", "no offset", "small with chunks", "large in a slab",
    "too few chunks", "outside", "twice", "a file and a folder",
])  # fmt: skip
def test_placed_files__that_are_no_tree_of_whole_slabs__are_refused(files: list[PushedFile]) -> None:
    with pytest.raises(InvalidRequestError):
        placed_files(files, 10)


def test_placed_files__beyond_the_limit__are_refused() -> None:
    with pytest.raises(LimitExceededError):
        placed_files([large("x", 0), large("y", 0)], 1)


def test_chunk_sizes__of_a_chunk_with_two_sizes__are_refused() -> None:
    placed = placed_files([large("x", 2**20, b"1"), large("y", 2**20 + 1, b"1")], 2)
    with pytest.raises(InvalidRequestError):
        chunk_sizes(placed)


def test_check_slab__compares_each_file() -> None:
    store, slab = MemoryStore(), digest_of(b"ab")
    store.put(slab, memoryview(b"ab"))
    check_slab(store, slab, {(0, 1, digest_of(b"a")), (1, 1, digest_of(b"b"))})
    with pytest.raises(InvalidRequestError):
        check_slab(store, slab, {(0, 1, digest_of(b"b"))})


@pytest.mark.parametrize("content", [None, b"ax"], ids=["lost", "altered"])
def test_check_slab__lost_or_altered__is_the_fault_of_the_store(content: bytes | None) -> None:
    store, slab = MemoryStore(), Digest(digest_of(b"ab").hex)
    if content is not None:
        store.put(slab, memoryview(content))
    with pytest.raises(DocumentDamagedError):
        check_slab(store, slab, {(0, 1, digest_of(b"a"))})
