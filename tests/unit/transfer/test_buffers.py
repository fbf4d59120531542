"""A fixed number of page-aligned buffers: who finds none waits."""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, Event, Lock

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.transfer.byte_threads import BufferPool


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK_SIZE - 1, CHUNK_SIZE])
def test_a_buffer_is_exactly_as_long_as_asked_for(size: int) -> None:
    with BufferPool(1).take(size) as buffer:
        assert (len(buffer), buffer.readonly) == (size, False)


def test_buffers_that_are_out_at_once_are_pages_of_their_own() -> None:
    pool = BufferPool(2)
    with pool.take(10) as first, pool.take(CHUNK_SIZE) as second:
        assert abs(address_of(first) - address_of(second)) >= CHUNK_SIZE
        assert {address_of(buffer) % mmap.PAGESIZE for buffer in (first, second)} == {0}


def test_memory_is_used_again_before_more_is_made_also_after_its_user_failed() -> None:
    pool, used = BufferPool(3), 0
    with suppress(LookupError), pool.take(10) as buffer:
        used = address_of(buffer)
        raise LookupError
    with pool.take(10) as buffer:
        assert address_of(buffer) == used


def test_who_finds_no_buffer_waits_for_one() -> None:
    pool, order, asking = BufferPool(1), list[str](), Event()

    def wait_for_one() -> None:
        asking.set()
        with pool.take(10):
            order.append("taken by the second")

    with ThreadPoolExecutor(1) as threads:
        with pool.take(10):
            waiting = threads.submit(wait_for_one)
            asking.wait(10)
            order.append("given back by the first")
        waiting.result(10)
    assert order == ["given back by the first", "taken by the second"]


def test_never_more_buffers_are_out_than_there_are() -> None:
    count, pool, lock, out, most = 3, BufferPool(3), Lock(), set[int](), list[int]()
    together = Barrier(count)

    def use(first: bool) -> None:
        with pool.take(1) as buffer:
            with lock:
                assert address_of(buffer) not in out
                out.add(address_of(buffer))
                most.append(len(out))
            if first:
                together.wait(10)  # all three at once
            with lock:
                out.remove(address_of(buffer))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, [True] * count + [False] * 50))
    assert max(most) == count


def test_memory_beyond_what_is_kept_goes_back_at_once_or_when_its_user_is_done() -> None:
    pool = BufferPool(3)
    with pool.take(1), pool.take(1):
        with pool.take(1):
            pass
        assert pool.made == 3
        pool.keep(1)
        assert pool.made == 2, "the free one is gone, those in use are not"
    assert pool.made == 1
    with pool.take(1), pool.take(1):
        assert pool.made == 2, "as many are given out as before"
    pool.keep(2)
    with pool.take(1), pool.take(1):
        pass
    assert pool.made == 2
