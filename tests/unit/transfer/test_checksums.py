"""The checksums that upstreams offer, against values that other programs computed: over bytes in order, over chunks in any order."""

import hashlib
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core import chunk
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import OrderedChecksum, PartChecksums, RunningChecksum, part_checksum
from tests.support.network.hypothesis import BRIEFLY

HELLO = b"hello\n"
KNOWN = [
    # sha256sum, git hash-object, md5sum
    (ChecksumKind.SHA256, HELLO, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"),
    (ChecksumKind.GIT_BLOB, HELLO, "ce013625030ba8dba906f756967f9e9ca394464a"),
    (ChecksumKind.MD5, HELLO, "b1946ac92492d2347c6235b4d2611184"),
    (ChecksumKind.SHA256, b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (ChecksumKind.GIT_BLOB, b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
    (ChecksumKind.MD5, b"", "d41d8cd98f00b204e9800998ecf8427e"),
    (ChecksumKind.SHA1, HELLO, "f572d396fae9206628714fb2ce00f72e94f2258f"),  # sha1sum
    (ChecksumKind.SHA1, b"", "da39a3ee5e6b4b0d3255bfef95601890afd80709"),
    # the check values of the catalogue of parametrised CRC algorithms (reveng)
    (ChecksumKind.CRC32, b"123456789", "cbf43926"),
    (ChecksumKind.CRC32C, b"123456789", "e3069283"),
    (ChecksumKind.CRC64NVME, b"123456789", "ae8b14860a799888"),
    (ChecksumKind.CRC32, b"", "00000000"),
    (ChecksumKind.CRC32C, b"", "00000000"),
    (ChecksumKind.CRC64NVME, b"", "0000000000000000"),
]

# Width and reflected polynomial. All three start with ones and invert the result.
# Source: catalogue of parametrised CRC algorithms (reveng): CRC-32/ISO-HDLC, CRC-32/ISCSI, CRC-64/NVME.
DIVISORS = {
    ChecksumKind.CRC32: (32, 0xEDB88320),
    ChecksumKind.CRC32C: (32, 0x82F63B78),
    ChecksumKind.CRC64NVME: (64, 0x9A6C9329AC4BC9B5),
}


def naive_crc(kind: ChecksumKind, content: bytes | bytearray) -> str:
    """By long division, bit by bit, as hexadecimal digits: slow, and independent of the libraries that the code uses."""
    width, divisor = DIVISORS[kind]
    ones = (1 << width) - 1
    rest = ones
    for byte in content:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (divisor if rest & 1 else 0)
    return f"{rest ^ ones:0{width // 4}x}"


def test_there_is_a_known_value_for_every_kind() -> None:
    assert {kind for kind, _, _ in KNOWN} == set(ChecksumKind)


@pytest.mark.parametrize(("kind", "content", "known"), KNOWN)
def test_the_right_bytes_pass_and_others_are_refused_with_both_values(
    kind: ChecksumKind, content: bytes, known: str
) -> None:
    running = RunningChecksum(Checksum(kind, known), len(content))
    for at in range(len(content)):
        running.update(memoryview(content)[at : at + 1])
    running.check("file")
    for wrong in (b"other", content + b"\0", content[:-1] or b"\n"):
        running = RunningChecksum(Checksum(kind, known), len(content))
        running.update(memoryview(wrong))
        said = f"a/file has the wrong content: expected {kind}:{known}, got {kind}:"
        with pytest.raises(ChecksumMismatchError, match=said):
            running.check("a/file")


@BRIEFLY
@given(pieces=st.lists(st.binary(max_size=50), max_size=8))
def test_it_does_not_matter_in_which_pieces_the_bytes_come(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    known = {
        ChecksumKind.SHA256: hashlib.sha256(content),
        ChecksumKind.MD5: hashlib.md5(content, usedforsecurity=False),
        ChecksumKind.SHA1: hashlib.sha1(content, usedforsecurity=False),
        ChecksumKind.GIT_BLOB: hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False),
    }
    expected = {kind: hasher.hexdigest() for kind, hasher in known.items()}
    expected |= {kind: naive_crc(kind, content) for kind in ChecksumKind if kind.is_combinable}
    assert set(expected) == set(ChecksumKind)
    for kind, value in expected.items():
        running = RunningChecksum(Checksum(kind, value), len(content))
        for piece in pieces:
            running.update(bytearray(piece))
        running.check("file")


# --- over chunks in any order ---

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
    with pytest.raises(ValueError, match="cannot be computed from the checksums of its parts"):
        PartChecksums(Checksum(kind, ""), 1)


def test_many_threads_may_offer_at_the_same_time() -> None:
    content = CONTENT * 20
    sums = sums_of(content, ChecksumKind.CRC64NVME)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: sums.offer(*pair), parts_of(content, ChecksumKind.CRC64NVME).items()))
    sums.check("file")


# --- over chunks nearly in order: hashed now, after a little while, or from the store in the end ---

CHUNKS = [bytes([number]) * (number + 1) for number in range(8)]
WHOLE = b"".join(CHUNKS)
EXPECTED = {
    ChecksumKind.SHA256: hashlib.sha256(WHOLE),
    ChecksumKind.SHA1: hashlib.sha1(WHOLE, usedforsecurity=False),
    ChecksumKind.MD5: hashlib.md5(WHOLE, usedforsecurity=False),
    ChecksumKind.GIT_BLOB: hashlib.sha1(b"blob %d\0%s" % (len(WHOLE), WHOLE), usedforsecurity=False),
}


def ordered(kind: ChecksumKind = ChecksumKind.SHA256) -> OrderedChecksum:
    return OrderedChecksum(Checksum(kind, EXPECTED[kind].hexdigest()), len(WHOLE))


def offer(checksum: OrderedChecksum, index: int, wait_seconds: float = 0) -> bool:
    return checksum.offer(index, bytearray(CHUNKS[index]), wait_seconds)


def finish(checksum: OrderedChecksum) -> int:
    """As a copier does in the end: the rest from the store. Returns how many chunks that were."""
    start, running = checksum.hand_over()
    for content in CHUNKS[start:]:
        running.update(bytearray(content))
    running.check("file")
    return len(CHUNKS) - start


@BRIEFLY
@given(order=st.permutations(range(len(CHUNKS))), kind=st.sampled_from(sorted(EXPECTED)))
def test_in_whatever_order_chunks_come_the_checksum_is_that_of_the_file(order: list[int], kind: ChecksumKind) -> None:
    checksum, expected_next = ordered(kind), 0
    for index in order:
        taken = offer(checksum, index)
        assert taken == (index == expected_next)
        expected_next += taken
    assert finish(checksum) == len(CHUNKS) - expected_next


@settings(BRIEFLY, max_examples=50)
@given(order=st.permutations(range(len(CHUNKS))))
def test_threads_that_wait_long_enough_leave_nothing_for_the_end(order: list[int]) -> None:
    checksum = ordered()
    with ThreadPoolExecutor(len(CHUNKS)) as threads:
        taken = list(threads.map(lambda index: offer(checksum, index, 60), order))
    assert taken == [True] * len(CHUNKS)
    assert finish(checksum) == 0


def test_a_chunk_that_was_taken_is_not_taken_twice() -> None:
    """Its thread could not store it, and fetched it once more."""
    checksum = ordered()
    assert [offer(checksum, index) for index in (0, 1, 0, 1, 1)] == [True] * 5
    assert checksum.next_index == 2
    assert finish(checksum) == 6


def test_who_waits_in_vain_is_let_go_when_the_file_is_given_up() -> None:
    checksum = ordered()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(offer, checksum, index, 60) for index in (3, 5)]
        assert checksum.hand_over()[0] == 0
        assert [future.result(60) for future in waiting] == [False, False]
    assert not offer(checksum, 0), "the rest is somebody else's now"


class _Slow:
    """A hasher that waits inside ``update`` until it is told to go on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.began, self.go_on = Event(), Event()

    def update(self, content: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(60)
        self.inner.update(content)

    def hexdigest(self) -> str:
        return str(self.inner.hexdigest())


@contextmanager
def while_the_first_chunk_is_hashed() -> Iterator[tuple[OrderedChecksum, ThreadPoolExecutor]]:
    checksum = ordered()
    running: Any = checksum._running
    running._hasher = hasher = _Slow(running._hasher)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(offer, checksum, 0)
        assert hasher.began.wait(60)
        yield checksum, threads
        hasher.go_on.set()
        assert first.result(60)


def test_while_one_chunk_is_hashed_others_may_come_and_go() -> None:
    with while_the_first_chunk_is_hashed() as (checksum, threads):
        assert not offer(checksum, 1), "it is not its turn yet, and nobody holds a lock meanwhile"
        second = threads.submit(offer, checksum, 1, 60)
    assert second.result(60)
    assert finish(checksum) == 6


def test_two_threads_with_the_same_chunk_hash_it_once() -> None:
    with while_the_first_chunk_is_hashed() as (checksum, threads):
        second = threads.submit(offer, checksum, 0)
        assert not second.done()
    assert second.result(60)
    assert finish(checksum) == 7


def test_handing_over_waits_for_the_chunk_that_is_being_hashed() -> None:
    with while_the_first_chunk_is_hashed() as (checksum, threads):
        finishing = threads.submit(finish, checksum)
        assert not finishing.done()
    assert finishing.result(60) == 7
