"""Chunks, their names, and where the bytes of a file lie."""

from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from bdn.core.chunk import (
    CHUNK_SIZE,
    EMPTY,
    ByteRange,
    Digest,
    FileLayout,
    PlacedChunk,
    Slice,
    chunk_range,
    digest_of,
    file_digest,
)
from tests.support.content.names import named


def test_a_chunk_is_eight_mebibytes() -> None:
    assert CHUNK_SIZE == 8_388_608


@pytest.mark.parametrize(("size", "index"), [(0, 0), (1, 1), (1, -1), (CHUNK_SIZE, 1), (CHUNK_SIZE + 1, 2)])
def test_a_chunk_outside_the_file_is_refused(size: int, index: int) -> None:
    with pytest.raises(ValueError, match=f"a file of {size} bytes has no chunk {index}"):
        chunk_range(size, index)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (5, 5), (5, 4), (-1, 1)])
def test_an_empty_reversed_or_negative_range_does_not_exist(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not a byte range"):
        ByteRange(start, stop)


HEX = "0123456789abcdef" * 4


def test_a_digest_is_written_with_its_algorithm_and_read_back() -> None:
    assert str(Digest(HEX)) == f"b3:{HEX}"
    assert Digest.parse(f"b3:{HEX}") == Digest(HEX)


def test_a_digest_is_the_blake3_of_the_bytes_whatever_buffer_holds_them() -> None:
    expected = blake3(b"weights").hexdigest()
    assert {digest_of(b"weights"), digest_of(bytearray(b"weights")), digest_of(memoryview(b"weights"))} == {
        Digest(expected)
    }


def test_the_digest_of_nothing_is_the_published_one() -> None:
    assert EMPTY.hex == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_the_fan_out_is_two_folders_and_the_whole_name() -> None:
    assert Digest(HEX).fanout == f"01/23/{HEX}"


NONE: list[tuple[Callable[[Any], Digest], list[str] | list[bytes]]] = [
    (Digest.parse, [
        "", HEX, f"b3:{HEX.upper()}", f"b3:{HEX[:-1]}", f"b3:{HEX}0", f"b3:{HEX}\n", f" b3:{HEX}", f"sha256:{HEX}",
        "b3:", "x" * 10_000,
    ]),
    (Digest, ["", HEX.upper(), HEX[:-1], f"{HEX}\n", f"b3:{HEX}", "../" * 21 + "x"]),
    (Digest.from_bytes, [b"", b"x" * 31, b"x" * 33]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given"), [(make, one) for make, all_of in NONE for one in all_of])
def test_anything_else_is_no_digest_and_shown_shortened(make: Callable[[Any], Digest], given: str | bytes) -> None:
    with pytest.raises(ValueError, match="not a digest") as caught:
        make(given)
    assert len(str(caught.value)) < 200


def test_a_small_file_is_named_like_its_only_chunk_or_like_nothing() -> None:
    assert file_digest(0, []) == EMPTY
    assert file_digest(7, [digest_of(b"weights")]) == digest_of(b"weights")


@pytest.mark.parametrize("prefix", [b"", b"bdn:file:v1", b"bdn:file:v1\0"])
@pytest.mark.parametrize("with_size", [False, True])
def test_a_small_file_that_spells_out_a_large_files_digests_has_another_name(prefix: bytes, with_size: bool) -> None:
    """Otherwise whoever uploads the small file owns the name of the large one in every shared cache."""
    size, chunks = 9_000_000, [digest_of(b"one"), digest_of(b"two")]
    spelled = prefix + (size.to_bytes(8, "big") if with_size else b"") + b"".join(c.to_bytes() for c in chunks)
    assert file_digest(len(spelled), [digest_of(spelled)]) != file_digest(size, chunks)


def test_the_name_of_a_larger_file_is_stable() -> None:
    """The rule is part of the format: whoever changes it orphans every mirrored file."""
    chunks = [digest_of(b"one"), digest_of(b"two")]
    hasher = blake3(derive_key_context="bdn:file:v1")
    hasher.update((9_000_000).to_bytes(8, "big") + chunks[0].to_bytes() + chunks[1].to_bytes())
    assert file_digest(9_000_000, chunks).hex == hasher.hexdigest()
    assert file_digest(9_000_000, iter(chunks)).hex == (
        "32e1c9cd83ff6b592dd4f48bd33195b8aa7f45959135319c4641be3295335bd6"
    )


ONE, TWO = named("one"), named("two")
SIZE = CHUNK_SIZE + 5


def test_chunks_are_placed_in_order_without_gaps() -> None:
    assert FileLayout.of(SIZE, (ONE, TWO)).placed() == (
        PlacedChunk(ONE, 0, ByteRange(0, CHUNK_SIZE)),
        PlacedChunk(TWO, 1, ByteRange(CHUNK_SIZE, SIZE)),
    )


FILE = digest_of(b"small")
SLAB = digest_of(b"a slab")
LARGE = FileLayout.of(SIZE, (ONE, TWO))


def test_a_packed_file_is_its_own_only_chunk_and_says_where_it_lies() -> None:
    layout = FileLayout(FILE, 5, (FILE,), Slice(SLAB, 100, 95))
    assert layout.chunks == (FILE,)
    assert layout.slice == Slice(SLAB, 100, 95)


@pytest.mark.parametrize(("digest", "size", "chunks", "lies"), [
    (LARGE.digest, SIZE + 1, (ONE, TWO), None),
    *((ONE, size, (ONE,), None) for size in (0, CHUNK_SIZE + 1, -1)),
    *((EMPTY, size, (), None) for size in (-1, 1)),
    (FILE, 5, (ONE,), Slice(SLAB, 100, 0)),
])  # fmt: skip
def test_what_does_not_make_up_the_file_is_no_layout(
    digest: Digest, size: int, chunks: tuple[Digest, ...], lies: Slice | None
) -> None:
    with pytest.raises(ValueError, match="do not make up file"):
        FileLayout(digest, size, chunks, lies)


@pytest.mark.parametrize(("digest", "size", "chunks", "lies"), [
    *((FILE, size, (FILE,), Slice(SLAB, 100, offset)) for size, offset in ((5, 96), (5, -1), (101, 0))),
    (FILE, 5, (FILE,), Slice(SLAB, CHUNK_SIZE + 1, 0)),
    (LARGE.digest, SIZE, (ONE, TWO), Slice(SLAB, 100, 0)),
    (EMPTY, 0, (), Slice(SLAB, 100, 0)),
])  # fmt: skip
def test_a_slice_holds_one_small_file_inside_a_slab_of_at_most_a_chunk(
    digest: Digest, size: int, chunks: tuple[Digest, ...], lies: Slice
) -> None:
    with pytest.raises(ValueError, match="cannot hold file"):
        FileLayout(digest, size, chunks, lies)
