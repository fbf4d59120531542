"""A chunk is believed when it hashes to its name; what may pass is tried again as the policy says, until it is stopped."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import (
    CanceledError,
    ChecksumMismatchError,
    NotFoundError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
)
from bdn.core.pace.retry import RetryPolicy
from bdn.transfer.chunk_readers import PartialChunk, RetryingReader, VerifyingReader, WrongLengthError, fetch
from bdn.transfer.under_way import Arriving
from tests.support.content.readers import CountedWaits, ScriptedReader, read_chunk

POLICY = RetryPolicy(0, attempts=4, first_seconds=1.0, longest_seconds=3.0, longest_retry_after_seconds=60.0)
AWAY = StoreUnavailableError("it restarts")
RIGHT, WRONG = b"right", b"wr0ng"


def verified(*steps: bytes | Exception | tuple[bytes, Exception]) -> tuple[VerifyingReader, ScriptedReader, list[int]]:
    scripted, mismatches = ScriptedReader(list(steps)), list[int]()
    return VerifyingReader(scripted, scripted, lambda chunk: mismatches.append(chunk.done)), scripted, mismatches


@pytest.mark.parametrize(("errors", "draws", "waits", "ends"), [
    ([], [], [], None),
    ([AWAY, AWAY, AWAY], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0], None),
    ([AWAY, AWAY, AWAY], [0.5, 0.0, 0.25], [0.5, 0.0, 0.75], None),  # each is drawn anew
    ([AWAY, AWAY, AWAY, AWAY], [0.0] * 4, [0.0] * 3, StoreUnavailableError),
    ([NotFoundError("chunk")], [1.0], [], NotFoundError),
    ([LookupError("a bug")], [1.0], [], LookupError),
    ([UpstreamRateLimitedError("s3://b", 42.0)], [0.0], [42.0], None),
    ([UpstreamRateLimitedError("s3://b", 61.0)], [0.0], [], UpstreamRateLimitedError),  # too long
])  # fmt: skip
def test_what_may_pass_is_tried_again_after_the_policys_delays(
    errors: list[Exception], draws: list[float], waits: list[float], ends: type[Exception] | None
) -> None:
    stop, scripted, drawn = CountedWaits(), ScriptedReader([*errors, RIGHT]), iter(draws)
    reader = RetryingReader(scripted, POLICY, stop, draw=lambda: next(drawn))
    if ends is None:
        assert read_chunk(reader, RIGHT) == RIGHT
    else:
        with pytest.raises(ends) as raised:
            read_chunk(reader, RIGHT)
        assert raised.value is errors[-1]
    assert stop.waits == waits
    assert scripted.asked == [digest_of(RIGHT)] * (len(waits) + 1)


def test_what_came_before_a_failure_is_not_asked_for_again() -> None:
    reader, scripted, _ = verified((b"ri", AWAY), (b"g", AWAY), b"ht")
    assert read_chunk(RetryingReader(reader, POLICY, CountedWaits()), RIGHT) == RIGHT
    assert scripted.starts == [0, 2, 3]


def test_a_budget_that_is_spent_ends_the_retries() -> None:
    left = iter([True, False])
    reader = RetryingReader(ScriptedReader([AWAY, AWAY, RIGHT]), POLICY, CountedWaits(), lambda _: next(left))
    with pytest.raises(StoreUnavailableError):
        read_chunk(reader, RIGHT)


def test_stopping_wakes_a_thread_that_waits_and_nothing_is_begun_afterwards() -> None:
    stop, scripted = threading.Event(), ScriptedReader([UpstreamRateLimitedError("s3://b", 59.0)])
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_chunk, RetryingReader(scripted, POLICY, stop), RIGHT)
        while not scripted.asked:
            stop.wait(0.001)
        stop.set()
        with pytest.raises(CanceledError):
            reading.result(20)
    with pytest.raises(CanceledError):
        read_chunk(RetryingReader(ScriptedReader([]), POLICY, stop), RIGHT)


@pytest.mark.parametrize("wrong", [WRONG, bytes(5), RIGHT[::-1], WrongLengthError("4 bytes instead of 5")])
def test_a_chunk_that_is_wrong_is_read_once_more_and_twice_wrong_is_an_error(wrong: bytes | WrongLengthError) -> None:
    reader, scripted, mismatches = verified(wrong, RIGHT)
    assert read_chunk(reader, RIGHT) == RIGHT
    assert (scripted.starts, len(mismatches)) == ([0, 0], 1)

    reader, scripted, mismatches = verified(wrong, WRONG, RIGHT)
    with pytest.raises(ChecksumMismatchError) as raised:
        read_chunk(reader, RIGHT)
    assert raised.value.subject == f"chunk {digest_of(RIGHT)}"
    assert (raised.value.expected, raised.value.actual) == (str(digest_of(RIGHT)), str(digest_of(WRONG)))
    assert (len(scripted.steps), len(mismatches)) == (1, 2)


def test_a_wrong_chunk_and_an_outage_are_both_survived() -> None:
    reader, scripted, _ = verified(WRONG, AWAY, WRONG, RIGHT)
    assert read_chunk(RetryingReader(reader, POLICY, CountedWaits()), RIGHT) == RIGHT
    assert scripted.steps == []


def test_a_chunk_knows_which_source_sent_how_much_of_it() -> None:
    chunk = PartialChunk(digest_of(RIGHT), memoryview(bytearray(RIGHT)))
    for tier, name, count in (("cluster", "a", 2), ("cluster", "b", 0), ("cluster", "a", 1), ("mirror", "", 2)):
        chunk.begin_source(tier, name)  # type: ignore[arg-type]
        chunk.received(chunk.buffer[chunk.done : chunk.done + count])
    chunk.check()
    assert (chunk.senders, chunk.missing) == (["a", ""], 0)
    assert chunk.bytes_by_tier == {"cluster": 3, "mirror": 2}
    chunk.restart()
    assert (chunk.senders, chunk.missing, chunk.bytes_by_tier) == ([], 5, {})
    chunk.found("node")
    assert chunk.bytes_by_tier == {"node": 5}


def test_of_a_chunk_what_others_sent_is_under_way_until_it_is_dropped() -> None:
    arriving, reader = Arriving(), verified(WRONG, RIGHT)[0]
    chunk = PartialChunk(digest_of(RIGHT), memoryview(bytearray(5)), arriving=arriving)
    chunk.received(chunk.buffer[:3])
    assert arriving.received == 3
    chunk.restart()
    assert arriving.received == 0
    reader.read_into(chunk)
    assert arriving.received == 5
    chunk.restart()
    chunk.found("node")
    assert arriving.received == 0


def test_a_chunk_is_stored_once_whoever_does_it() -> None:
    class Storing(ScriptedReader):
        def read_into(self, chunk: PartialChunk) -> None:
            super().read_into(chunk)
            chunk.store()

    for reader in (ScriptedReader([RIGHT]), Storing([RIGHT])):
        buffer, stored = memoryview(bytearray(5)), list[bytes]()
        fetch(reader, digest_of(RIGHT), buffer, lambda: stored.append(bytes(buffer)))  # noqa: B023
        assert stored == [RIGHT]
