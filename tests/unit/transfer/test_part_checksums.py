"""The checksums of chunks, in any order, make up that of the file."""

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
CRC32 = ChecksumKind.CRC32
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


def sums_of(content: bytes, kind: ChecksumKind, *offers: dict[int, int]) -> PartChecksums:
    """Of a file with this content, after these offers."""
    sums = PartChecksums(Checksum(kind, naive_crc(kind, content)), len(content))
    for parts in offers:
        for index, part in parts.items():
            sums.offer(index, part)
    return sums


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
    parts = parts_of(content, kind)
    order = data.draw(st.permutations(sorted(parts)))
    sums_of(content, kind, {index: parts[index] for index in order}).check("file")


def test_a_checksum_that_begins_with_zeros_keeps_them() -> None:
    content = next(text for number in range(100_000) if zlib.crc32(text := b"%d" % number) < 1 << 20)
    sums_of(content, CRC32, parts_of(content, CRC32)).check("file")


@EACH
@pytest.mark.parametrize("at", [0, 99, 100, 500, len(CONTENT) - 1])
def test_one_wrong_bit_anywhere_is_found(kind: ChecksumKind, at: int) -> None:
    wrong = bytearray(CONTENT)
    wrong[at] ^= 1
    words = f"expected {kind}:{naive_crc(kind, CONTENT)}, got {kind}:{naive_crc(kind, wrong)}"
    with pytest.raises(ChecksumMismatchError, match=f"a/file has the wrong content: {words}"):
        sums_of(CONTENT, kind, parts_of(bytes(wrong), kind)).check("a/file")


@EACH
def test_two_chunks_in_each_others_place_are_found(kind: ChecksumKind) -> None:
    parts = parts_of(CONTENT, kind)
    with pytest.raises(ChecksumMismatchError):
        sums_of(CONTENT, kind, parts | {1: parts[5], 5: parts[1]}).check("file")


def test_what_is_missing_is_named_and_nothing_is_checked_without_it() -> None:
    parts = parts_of(CONTENT, CRC32)
    assert sums_of(CONTENT, CRC32).missing == tuple(range(11))
    sums = sums_of(CONTENT, CRC32, {index: parts[index] for index in (10, 0, 4)})
    assert sums.missing == (1, 2, 3, 5, 6, 7, 8, 9)
    with pytest.raises(ValueError, match="8 chunks of file were not offered"):
        sums.check("file")


def test_a_chunk_that_was_fetched_again_counts_once_and_as_it_was_last() -> None:
    sums_of(CONTENT, CRC32, {3: 12345}, parts_of(CONTENT, CRC32)).check("file")


@pytest.mark.parametrize("index", [-1, 11])
def test_a_chunk_that_the_file_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="has no chunk"):
        sums_of(CONTENT, CRC32, {index: 0})


@pytest.mark.parametrize("kind", [kind for kind in ChecksumKind if not kind.is_combinable])
def test_a_checksum_that_needs_order_is_refused(kind: ChecksumKind) -> None:
    with pytest.raises(ValueError, match="does not follow from those of its parts"):
        PartChecksums(Checksum(kind, ""), 1)


def test_many_threads_may_offer_at_the_same_time() -> None:
    content = CONTENT * 20
    sums = sums_of(content, ChecksumKind.CRC64NVME)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: sums.offer(*pair), parts_of(content, ChecksumKind.CRC64NVME).items()))
    sums.check("file")
