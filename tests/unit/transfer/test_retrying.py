"""What may pass is tried again: as often and after as long as the policy says, and no longer than until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from bdn.core.digest import digest_of
from bdn.core.errors import (
    BdnError,
    CanceledError,
    ChecksumMismatchError,
    NotFoundError,
    StoreUnavailableError,
    UpstreamRateLimitedError,
)
from bdn.core.pace.retry import RetryPolicy
from bdn.store.memory import MemoryStore
from bdn.transfer.retrying import Retrier, RetryingReader
from bdn.transfer.verifying import VerifyingReader
from tests.support.content.readers import CountedWaits, ScriptedReader, read_chunk

POLICY = RetryPolicy(attempts=4, first_seconds=1.0, longest_seconds=3.0, longest_retry_after_seconds=60.0)
AWAY = StoreUnavailableError("it restarts")
RIGHT, WRONG = b"right", b"wr0ng"


def failing(*errors: BdnError) -> Callable[[], None]:
    """Fails with each error once, then succeeds."""
    remaining = list(errors)

    def call() -> None:
        if remaining:
            raise remaining.pop(0)

    return call


def retrier(stop: threading.Event, draw: float = 1.0) -> Retrier:
    return Retrier(POLICY, stop, lambda: draw)


def test_a_call_that_succeeds_is_made_once() -> None:
    waits, calls = CountedWaits(), [0]

    def call() -> None:
        calls[0] += 1

    retrier(waits).run(call)
    assert (calls, waits.waits) == ([1], [])


def test_what_may_pass_is_tried_again_after_the_policys_delays() -> None:
    waits = CountedWaits()
    retrier(waits).run(failing(AWAY, AWAY, AWAY))
    assert waits.waits == [1.0, 2.0, 3.0]


def test_every_delay_is_drawn_anew() -> None:
    waits, draws = CountedWaits(), iter([0.5, 0.0, 0.25])
    Retrier(POLICY, waits, lambda: next(draws)).run(failing(AWAY, AWAY, AWAY))
    assert waits.waits == [0.5, 0.0, 0.75]


def test_the_last_error_is_raised_when_all_attempts_failed() -> None:
    waits = CountedWaits()
    errors = [StoreUnavailableError(f"attempt {number}") for number in range(1, 6)]
    with pytest.raises(StoreUnavailableError) as raised:
        retrier(waits).run(failing(*errors))
    assert raised.value is errors[3]
    assert len(waits.waits) == 3


def test_what_will_not_pass_is_not_tried_again() -> None:
    waits = CountedWaits()
    with pytest.raises(NotFoundError):
        retrier(waits).run(failing(NotFoundError("chunk")))
    assert waits.waits == []


def test_an_error_that_is_not_ours_is_not_tried_again() -> None:
    waits = CountedWaits()

    def call() -> None:
        raise LookupError("a bug")

    with pytest.raises(LookupError):
        retrier(waits).run(call)
    assert waits.waits == []


def test_retry_after_is_honoured() -> None:
    waits = CountedWaits()
    retrier(waits, draw=0.0).run(failing(UpstreamRateLimitedError("s3://b", 42.0)))
    assert waits.waits == [42.0]


def test_who_asks_for_more_patience_than_the_policy_has_is_not_tried_again() -> None:
    waits = CountedWaits()
    with pytest.raises(UpstreamRateLimitedError):
        retrier(waits).run(failing(UpstreamRateLimitedError("s3://b", 61.0)))
    assert waits.waits == []


def test_stopping_ends_the_waiting() -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1
        raise AWAY

    def stop() -> None:
        waits.set()

    waits = CountedWaits(on_wait=stop)
    with pytest.raises(CanceledError):
        retrier(waits).run(call)
    assert (calls, len(waits.waits)) == ([1], 1)


def test_stopping_wakes_a_thread_that_waits() -> None:
    stop, failed = threading.Event(), threading.Event()
    raised: list[BdnError] = []

    def call() -> None:
        failed.set()
        raise UpstreamRateLimitedError("s3://b", 59.0)

    def run() -> None:
        try:
            retrier(stop).run(call)
        except BdnError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    failed.wait(20)
    stop.set()
    thread.join(20)
    assert [error.code for error in raised] == ["CANCELED"]


def test_what_was_stopped_before_is_never_begun() -> None:
    stop = CountedWaits()
    stop.set()
    with pytest.raises(CanceledError):
        retrier(stop).run(lambda: pytest.fail("it was called"))


def reading(*steps: bytes | Exception) -> tuple[RetryingReader, ScriptedReader, CountedWaits]:
    scripted, waits = ScriptedReader(list(steps)), CountedWaits()
    return RetryingReader(VerifyingReader(scripted), retrier(waits)), scripted, waits


def test_a_reader_that_fails_for_a_while_delivers_in_the_end() -> None:
    reader, scripted, waits = reading(AWAY, AWAY, RIGHT)
    assert read_chunk(reader, RIGHT) == RIGHT
    assert (scripted.asked, waits.waits) == ([digest_of(RIGHT)] * 3, [1.0, 2.0])


def test_a_chunk_that_was_wrong_once_is_read_once_more_at_once() -> None:
    reader, _, waits = reading(WRONG, RIGHT)
    assert read_chunk(reader, RIGHT) == RIGHT
    assert waits.waits == []


def test_a_chunk_that_was_wrong_twice_is_wrong() -> None:
    reader, scripted, waits = reading(WRONG, WRONG, RIGHT)
    with pytest.raises(ChecksumMismatchError):
        read_chunk(reader, RIGHT)
    assert (len(scripted.asked), waits.waits) == (2, [])


def test_a_wrong_chunk_and_an_outage_are_both_survived() -> None:
    reader, scripted, _ = reading(WRONG, AWAY, WRONG, RIGHT)
    assert read_chunk(reader, RIGHT) == RIGHT
    assert scripted.steps == []


def test_an_absent_chunk_is_asked_for_once() -> None:
    reader, scripted, _ = reading(NotFoundError("chunk"), RIGHT)
    with pytest.raises(NotFoundError):
        read_chunk(reader, RIGHT)
    assert len(scripted.asked) == 1


@pytest.mark.parametrize("delivered", [WRONG, bytes(5), RIGHT[::-1]])
def test_a_chunk_is_believed_only_when_it_hashes_to_its_name(delivered: bytes) -> None:
    with pytest.raises(ChecksumMismatchError) as raised:
        read_chunk(VerifyingReader(ScriptedReader([delivered])), RIGHT)
    expected, actual = digest_of(RIGHT), digest_of(delivered)
    assert raised.value.subject == f"chunk {expected}"
    assert (raised.value.expected, raised.value.actual) == (str(expected), str(actual))


def test_a_chunk_that_is_held_under_a_wrong_name_is_not_believed() -> None:
    store = MemoryStore()
    store.put(digest_of(RIGHT), memoryview(WRONG))
    with pytest.raises(ChecksumMismatchError), store.open(digest_of(RIGHT)) as file:
        read_chunk(VerifyingReader(ScriptedReader([file.read()])), RIGHT)
