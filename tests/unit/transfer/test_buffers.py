"""A fixed number of page-aligned buffers: who finds none waits."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock, Thread

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.transfer.buffers import BufferPool


def address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK_SIZE - 1, CHUNK_SIZE])
def test_a_buffer_is_exactly_as_long_as_asked_for(size: int) -> None:
    with BufferPool(1).take(size) as buffer:
        assert len(buffer) == size
        assert not buffer.readonly


def test_every_buffer_begins_on_a_page() -> None:
    pool = BufferPool(2)
    with pool.take(10) as first, pool.take(CHUNK_SIZE) as second:
        assert address_of(first) % mmap.PAGESIZE == 0
        assert address_of(second) % mmap.PAGESIZE == 0


def test_two_that_are_out_at_once_are_not_the_same_memory() -> None:
    pool = BufferPool(2)
    with pool.take(4) as first, pool.take(4) as second:
        first[:], second[:] = b"1111", b"2222"
        assert (bytes(first), bytes(second)) == (b"1111", b"2222")


def test_memory_is_used_again_before_more_is_made() -> None:
    pool = BufferPool(3)
    with pool.take(10) as buffer:
        used = address_of(buffer)
    with pool.take(10) as buffer:
        assert address_of(buffer) == used


def test_a_buffer_comes_back_when_its_user_fails() -> None:
    pool = BufferPool(1)
    with pytest.raises(ZeroDivisionError), pool.take(10):
        _ = 1 / 0
    taken = Event()

    def take() -> None:
        with pool.take(10):
            taken.set()

    Thread(target=take, daemon=True).start()  # which would wait for ever
    assert taken.wait(10)


def test_who_finds_no_buffer_waits_for_one() -> None:
    pool = BufferPool(1)
    order: list[str] = []
    asking = Event()

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
    count, pool, lock = 3, BufferPool(3), Lock()
    together = Barrier(count)
    out: set[int] = set()
    most = 0

    def use(first: bool) -> None:
        nonlocal most
        with pool.take(1) as buffer:
            with lock:
                assert address_of(buffer) not in out
                out.add(address_of(buffer))
                most = max(most, len(out))
            if first:
                together.wait(10)  # all three at once
            with lock:
                out.remove(address_of(buffer))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, [True] * count + [False] * 50))
    assert most == count


def test_memory_beyond_what_is_kept_goes_back_at_once_or_when_its_user_is_done() -> None:
    pool = BufferPool(3)
    with pool.take(1), pool.take(1):
        with pool.take(1):
            pass
        assert pool.made == 3
        pool.keep(1)
        assert pool.made == 2, "the free one is gone, those in use are not"
    assert pool.made == 1


def test_a_pool_that_keeps_few_still_gives_out_as_many_as_before() -> None:
    pool = BufferPool(2)
    pool.keep(1)
    with pool.take(1) as first, pool.take(1) as second:
        assert address_of(first) != address_of(second)
    assert pool.made == 1
    pool.keep(2)
    with pool.take(1), pool.take(1):
        pass
    assert pool.made == 2
