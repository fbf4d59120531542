"""The checksums of chunks, in any order, make up that of the file."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core import chunk
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import PartChecksums, part_checksum
from tests.support.content.naive_crc import naive_crc
from tests.support.network.hypothesis import BRIEFLY

KINDS = [kind for kind in ChecksumKind if kind.is_combinable]
EACH = pytest.mark.parametrize("kind", KINDS)
CONTENT = bytes(range(256)) * 4 + b"!"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of a few bytes has many."""
    monkeypatch.setattr(chunk, "CHUNK_SIZE", 100)


def parts_of(content: bytes, kind: ChecksumKind) -> dict[int, int]:
    size = len(content)
    ranges = [chunk.chunk_range(size, index) for index in range(chunk.chunk_count(size))]
    return {
        index: part_checksum(kind, memoryview(content)[found.start : found.stop]) for index, found in enumerate(ranges)
    }


@EACH
def test_a_part_is_computed_as_other_programs_do(kind: ChecksumKind) -> None:
    width = 16 if kind is ChecksumKind.CRC64NVME else 8
    for content in (b"", b"123456789", CONTENT):
        assert f"{part_checksum(kind, bytearray(content)):0{width}x}" == naive_crc(kind, content)


@BRIEFLY
@given(content=st.binary(max_size=1200), kind=st.sampled_from(KINDS), data=st.data())
def test_in_whatever_order_the_chunks_come_they_make_up_the_file(
    content: bytes, kind: ChecksumKind, data: st.DataObject
) -> None:
    sums = PartChecksums(Checksum(kind, naive_crc(kind, content)), len(content))
    parts = parts_of(content, kind)
    for index in data.draw(st.permutations(sorted(parts))):
        sums.offer(index, parts[index])
    sums.check("file")


def test_the_standard_librarys_checksum_is_the_same() -> None:
    sums = PartChecksums(Checksum(ChecksumKind.CRC32, f"{zlib.crc32(CONTENT):08x}"), len(CONTENT))
    for index, part in parts_of(CONTENT, ChecksumKind.CRC32).items():
        sums.offer(index, part)
    sums.check("file")


def test_a_checksum_that_begins_with_zeros_keeps_them() -> None:
    content = next(text for number in range(100_000) if zlib.crc32(text := b"%d" % number) < 1 << 20)
    sums = PartChecksums(Checksum(ChecksumKind.CRC32, naive_crc(ChecksumKind.CRC32, content)), len(content))
    sums.offer(0, part_checksum(ChecksumKind.CRC32, content))  # type: ignore[arg-type]
    sums.check("file")


@EACH
@pytest.mark.parametrize("at", [0, 99, 100, 500, len(CONTENT) - 1])
def test_one_wrong_bit_anywhere_is_found(kind: ChecksumKind, at: int) -> None:
    expected = Checksum(kind, naive_crc(kind, CONTENT))
    wrong = bytearray(CONTENT)
    wrong[at] ^= 1
    sums = PartChecksums(expected, len(CONTENT))
    for index, part in parts_of(bytes(wrong), kind).items():
        sums.offer(index, part)
    with pytest.raises(
        ChecksumMismatchError,
        match=f"a/file has the wrong content: expected {kind}:{expected.hex}, got {kind}:{naive_crc(kind, wrong)}",
    ):
        sums.check("a/file")


@EACH
def test_two_chunks_in_each_others_place_are_found(kind: ChecksumKind) -> None:
    parts = parts_of(CONTENT, kind)
    sums = PartChecksums(Checksum(kind, naive_crc(kind, CONTENT)), len(CONTENT))
    for index, part in (parts | {1: parts[5], 5: parts[1]}).items():
        sums.offer(index, part)
    with pytest.raises(ChecksumMismatchError):
        sums.check("file")


def test_what_is_missing_is_named_and_nothing_is_checked_without_it() -> None:
    parts = parts_of(CONTENT, ChecksumKind.CRC32C)
    sums = PartChecksums(Checksum(ChecksumKind.CRC32C, naive_crc(ChecksumKind.CRC32C, CONTENT)), len(CONTENT))
    assert sums.missing == tuple(range(11))
    for index in (10, 0, 4):
        sums.offer(index, parts[index])
    assert sums.missing == (1, 2, 3, 5, 6, 7, 8, 9)
    with pytest.raises(ValueError, match="8 chunks of file were not offered"):
        sums.check("file")


def test_a_chunk_that_was_fetched_again_counts_once_and_as_it_was_last() -> None:
    parts = parts_of(CONTENT, ChecksumKind.CRC32)
    sums = PartChecksums(Checksum(ChecksumKind.CRC32, naive_crc(ChecksumKind.CRC32, CONTENT)), len(CONTENT))
    sums.offer(3, 12345)
    for index, part in parts.items():
        sums.offer(index, part)
    sums.check("file")


@pytest.mark.parametrize("index", [-1, 11])
def test_a_chunk_that_the_file_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="has no chunk"):
        PartChecksums(Checksum(ChecksumKind.CRC32, ""), len(CONTENT)).offer(index, 0)


@pytest.mark.parametrize("kind", [kind for kind in ChecksumKind if not kind.is_combinable])
def test_a_checksum_that_needs_order_is_refused(kind: ChecksumKind) -> None:
    with pytest.raises(ValueError, match="does not follow from those of its parts"):
        PartChecksums(Checksum(kind, ""), 1)


def test_many_threads_may_offer_at_the_same_time() -> None:
    content = CONTENT * 20
    parts = parts_of(content, ChecksumKind.CRC64NVME)
    sums = PartChecksums(Checksum(ChecksumKind.CRC64NVME, naive_crc(ChecksumKind.CRC64NVME, content)), len(content))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: sums.offer(*pair), parts.items()))
    sums.check("file")
