"""Byte threads that need the same chunks at the same time."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from bdn.core.digest import Digest
from bdn.core.errors import StoreUnavailableError
from node_agent.fetch.origin_reads import OriginReads
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(40)]
NEVER = threading.Event()


def test_a_thread_that_waits_goes_on_when_the_read_lands() -> None:
    reads, asked = OriginReads(), threading.Event()
    assert reads.lead(CHUNKS[0])

    def wait() -> bool:
        asked.set()
        return reads.wait(CHUNKS[0], 60, NEVER)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        asked.wait(60)
        reads.landed(CHUNKS[0])
        assert waiting.result(60)


def test_a_thread_that_waits_goes_on_when_its_stage_is_released() -> None:
    reads, stop = OriginReads(), threading.Event()
    assert reads.lead(CHUNKS[0])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reads.wait, CHUNKS[0], 60, stop)
        stop.set()
        assert not waiting.result(60)


def test_threads_that_keep_to_the_rules_read_each_chunk_once_also_when_leaders_fail() -> None:
    """Each first read of every third chunk fails; whoever waited for it takes over."""
    reads, lock = OriginReads(), threading.Lock()
    held: set[Digest] = set()
    count: Counter[Digest] = Counter()

    def read(number: int) -> None:
        with lock:
            count[CHUNKS[number]] += 1
            is_first = count[CHUNKS[number]] == 1
        if number % 3 == 0 and is_first:
            raise StoreUnavailableError("it is down")
        held.add(CHUNKS[number])

    def obtain(number: int) -> None:
        chunk = CHUNKS[number]
        while chunk not in held:
            if not reads.lead(chunk):
                assert reads.wait(chunk, 60, NEVER)
                continue
            try:
                if chunk not in held:
                    read(number)
            except StoreUnavailableError as error:
                reads.failed(chunk, error)
            else:
                reads.landed(chunk)

    with ThreadPoolExecutor(8) as threads:
        for number in range(len(CHUNKS)):
            for _ in range(8):
                threads.submit(obtain, number)
    assert held == set(CHUNKS)
    assert count == {chunk: 2 if number % 3 == 0 else 1 for number, chunk in enumerate(CHUNKS)}
