"""Chunks that come out of order are hashed in order: now, after a little while, or from the store in the end."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import OrderedChecksum
from tests.support.network.hypothesis import BRIEFLY

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
        assert [future.result(10) for future in waiting] == [False, False]
    assert not offer(checksum, 0), "the rest is somebody else's now"


class _Slow:
    """A hasher that waits inside ``update`` until it is told to go on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.began, self.go_on = Event(), Event()

    def update(self, content: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(10)
        self.inner.update(content)

    def hexdigest(self) -> str:
        return str(self.inner.hexdigest())


@pytest.fixture
def slow() -> tuple[OrderedChecksum, _Slow]:
    checksum = ordered()
    running: Any = checksum._running
    running._hasher = hasher = _Slow(running._hasher)
    return checksum, hasher


def test_while_one_chunk_is_hashed_others_may_come_and_go(slow: tuple[OrderedChecksum, _Slow]) -> None:
    checksum, hasher = slow
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(offer, checksum, 0)
        assert hasher.began.wait(10)
        assert not offer(checksum, 1), "it is not its turn yet, and nobody holds a lock meanwhile"
        second: Future[bool] = threads.submit(offer, checksum, 1, 60)
        hasher.go_on.set()
        assert first.result(10)
        assert second.result(10)
    assert finish(checksum) == 6


def test_two_threads_with_the_same_chunk_hash_it_once(slow: tuple[OrderedChecksum, _Slow]) -> None:
    checksum, hasher = slow
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(offer, checksum, 0)
        assert hasher.began.wait(10)
        second = threads.submit(offer, checksum, 0)
        assert not second.done()
        hasher.go_on.set()
        assert (first.result(10), second.result(10)) == (True, True)
    assert finish(checksum) == 7


def test_handing_over_waits_for_the_chunk_that_is_being_hashed(slow: tuple[OrderedChecksum, _Slow]) -> None:
    checksum, hasher = slow
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(offer, checksum, 0)
        assert hasher.began.wait(10)
        finishing = threads.submit(finish, checksum)
        assert not finishing.done()
        hasher.go_on.set()
        assert first.result(10)
        assert finishing.result(10) == 7
