"""Byte threads that need the same chunks at the same time."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from node_agent.fetch.reads_in_progress import ReadsInProgress
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(40)]
NEVER = threading.Event()


def test_a_thread_that_waits_goes_on_when_the_leader_is_through_or_its_stage_is_released() -> None:
    reads, stop = ReadsInProgress(), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        with reads.lead(CHUNKS[0]) as is_leader:
            assert is_leader
            waiting = threads.submit(reads.wait, CHUNKS[0], 60, NEVER)
            released = threads.submit(reads.wait, CHUNKS[0], 60, stop)
            stop.set()
            assert not released.result(60)
        assert waiting.result(60)


def test_threads_that_keep_to_the_rules_read_each_chunk_once_also_when_leaders_fail() -> None:
    """Each first read of every third chunk fails; whoever waited for it takes over."""
    reads, lock = ReadsInProgress(), threading.Lock()
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
            with suppress(StoreUnavailableError), reads.lead(chunk) as is_leader:
                if is_leader and chunk not in held:
                    read(number)
            assert reads.wait(chunk, 60, NEVER)

    with ThreadPoolExecutor(8) as threads:
        for number in range(len(CHUNKS)):
            for _ in range(8):
                threads.submit(obtain, number)
    assert held == set(CHUNKS)
    assert count == {chunk: 2 if number % 3 == 0 else 1 for number, chunk in enumerate(CHUNKS)}


def test_who_hears_that_a_leader_was_canceled_hears_nothing_of_the_key() -> None:
    """It may hold a grant, and errors are logged."""
    reads = ReadsInProgress()
    with suppress(KeyboardInterrupt), reads.lead(("manifest", "secret")):
        flight = reads.flight(("manifest", "secret"))
        raise KeyboardInterrupt
    assert flight is not None
    assert "secret" not in str(flight.exception())
