"""A chunk comes from the bucket of the mirror's store where the mirror says so, from the mirror where that fails, and is right."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, CanceledError, StoreUnavailableError
from bdn.wire.http_fields import SUSPECT_HEADER
from bdn.wire.location_schema import Locations
from tests.doubles.faults import Fault, altered, answer, flip_byte, hang, reset, truncate
from tests.doubles.http_origin import Origin
from tests.support.agent.reader_chain import SIGNATURE, Bench, bench, starts
from tests.support.content.noise import noise

CONTENT = noise(20_000)
SIZE = len(CONTENT)
SOUND, EXPIRED, ABSENT, BUSY, LIE = altered({}), answer(403), answer(404), answer(503), flip_byte()


@contextmanager
def alone(root: Path, store: list[Fault] | None, mirror: list[Fault] | None = None) -> Iterator[Bench]:
    """A node without peers; None for what does not listen."""
    with bench(root, CONTENT, None, None, mirror, store=store, delivery="direct") as found:
        yield found


def counts(found: Bench) -> tuple[int, int]:
    """How often bucket and mirror were asked."""
    return found.store.log.count(), found.mirror.log.count()


def test_a_chunk_comes_from_the_bucket_which_hears_of_no_grant(tmp_path: Path) -> None:
    with alone(tmp_path, [SOUND]) as node:
        assert node.fetch(CONTENT) == {"mirror": SIZE}
        assert counts(node) == (1, 0)
        assert node.came == {"direct": SIZE}
        (asked,) = node.store.log.find()
        assert asked.target == f"/b3/{digest_of(CONTENT).hex}?X-Amz-Signature={SIGNATURE}"
        assert asked.headers == {"x-amz-checksum-mode": "ENABLED", "accept-encoding": "identity"}


def test_what_peers_have_is_not_asked_of_the_bucket(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, delivery="direct") as node:
        assert node.fetch(CONTENT) == {"cluster": SIZE}
        assert node.locating.asked == []


@pytest.mark.parametrize("refusal", [EXPIRED, answer(400), answer(401)], ids=["403", "400", "401"])
def test_an_address_that_is_refused_is_asked_for_anew_once(tmp_path: Path, refusal: Fault) -> None:
    with alone(tmp_path, [refusal, SOUND]) as node:
        node.fetch(CONTENT)
        assert counts(node) == (2, 0)
        assert node.locating.asked == [[digest_of(CONTENT)]] * 2


@pytest.mark.parametrize(("store", "asked", "reason", "is_suspect"), [
    ([EXPIRED], 2, "refused", False),
    ([ABSENT], 1, "absent", True),  # the mirror shall look, and repair it
    ([reset(0)], 1, "unreachable", False),
    (None, 0, "unreachable", False),
], ids=["refused", "absent", "reset", "dead"])  # fmt: skip
def test_where_the_bucket_does_not_serve_a_chunk_the_mirror_does_and_it_is_said_why(
    tmp_path: Path, store: list[Fault] | None, asked: int, reason: str, *, is_suspect: bool
) -> None:
    with alone(tmp_path, store, [SOUND]) as node:
        assert node.fetch(CONTENT) == {"mirror": SIZE}
        assert counts(node) == (asked, 1)
        assert node.instead == {reason: 1}
        assert node.came["proxy"] == SIZE
        (request,) = node.mirror.log.find()
        assert (SUSPECT_HEADER.lower() in request.headers) is is_suspect
        assert request.headers["authorization"] == "Bearer grant"


@pytest.mark.parametrize("status", [301, 302, 307])
def test_the_bucket_sends_nobody_elsewhere(tmp_path: Path, status: int) -> None:
    with Origin("elsewhere", lambda _: pytest.fail("asked")) as elsewhere:
        with alone(tmp_path, [answer(status, {"Location": f"{elsewhere.url}/?{SIGNATURE}"})], [SOUND]) as node:
            node.fetch(CONTENT)
            assert node.instead == {"unreachable": 1}
        assert elsewhere.log.count() == 0


@pytest.mark.parametrize(("faults", "reason"), [([reset(0)], "unreachable"), ([EXPIRED, EXPIRED], "refused")])
def test_a_bucket_that_serves_nothing_is_left_alone_for_a_while(
    tmp_path: Path, faults: list[Fault], reason: str
) -> None:
    with alone(tmp_path, [*faults, SOUND], [SOUND]) as node:
        tried = len(faults)
        for later, asked in ((0, (tried, 1)), (0, (tried, 2)), (1000, (tried + 1, 2)), (0, (tried + 2, 2))):
            node.clock.now += later
            node.fetch(CONTENT)
            node.held.chunks.clear()
            assert counts(node) == asked
        assert node.instead == {reason: 1, "avoided": 1}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_bucket_is_asked_again_with_less_in_flight_and_the_mirror_is_spared(tmp_path: Path, status: int) -> None:
    with alone(tmp_path, [answer(status), answer(status), SOUND], [SOUND]) as node:
        before = node.bucket.limit
        assert node.fetch(CONTENT) == {"mirror": SIZE}
        assert counts(node) == (3, 0)
        assert node.bucket.limit < before
        assert node.budget.document().retries == 1  # both in one round


@pytest.mark.parametrize("fault", [truncate(SIZE // 4), reset(SIZE // 4)], ids=["truncated", "reset"])
def test_an_answer_that_breaks_off_goes_on_from_where_it_was(tmp_path: Path, fault: Fault) -> None:
    with alone(tmp_path, [fault, SOUND], [SOUND]) as node:
        assert node.fetch(CONTENT) == {"mirror": SIZE}
        begun = starts(node.store)
        assert (begun[0], len(begun), node.mirror.log.count()) == (0, 2, 0)
        assert 0 < begun[1] <= SIZE // 4
        assert node.came == {"direct": SIZE}


@pytest.mark.promise("corruption")
def test_wrong_bytes_of_the_bucket_make_the_mirror_look(tmp_path: Path) -> None:
    with alone(tmp_path, [LIE], [SOUND]) as node:
        assert node.fetch(CONTENT) == {"mirror": SIZE}
        assert counts(node) == (1, 1)
        assert SUSPECT_HEADER.lower() in node.mirror.log.find()[0].headers
        assert len(node.mismatches) == 1


def test_without_the_mirror_the_bucket_is_read_while_addresses_are_good_and_not_afterwards(tmp_path: Path) -> None:
    with alone(tmp_path, [BUSY, SOUND]) as node:
        node.locating.answers = [node.locating(digest_of(CONTENT), [digest_of(CONTENT)], "grant", threading.Event())]
        node.locating.answers += [StoreUnavailableError("it is away")] * 9
        assert node.fetch(CONTENT) == {"mirror": SIZE}  # by the address that it was told before
        node.held.chunks.clear()
        with pytest.raises(StoreUnavailableError):
            node.fetch(CONTENT)  # an address is used once
        assert counts(node) == (2, 0)


def test_a_mirror_that_says_no_address_is_asked_for_the_bytes_and_a_while_later_for_an_address(tmp_path: Path) -> None:
    with alone(tmp_path, [SOUND], [SOUND]) as node:
        node.locating.answers = [Locations(delivery="proxy"), StoreUnavailableError("its store is away")]
        for later, asked in ((0, (0, 1)), (1, (0, 2)), (1000, (0, 3)), (0, (0, 4)), (1000, (1, 4))):
            node.clock.now += later
            node.fetch(CONTENT)
            node.held.chunks.clear()
            assert counts(node) == asked
        assert len(node.locating.asked) == 3


def test_of_an_address_nothing_but_its_host_is_said(tmp_path: Path) -> None:
    for store in ([BUSY], [truncate(0)], None):
        with alone(tmp_path, store) as node:
            with pytest.raises(BdnError) as raised:
                node.fetch(CONTENT)
            assert "127.0.0.1" in str(raised.value)
            assert SIGNATURE not in f"{raised.value!r} {raised.getrepr(chain=True)}"


def test_a_fill_that_is_stopped_does_not_wait_for_a_silent_bucket(tmp_path: Path) -> None:
    with alone(tmp_path, [], [SOUND]) as node:
        node.store.fail(hang(before=node.stop.set))
        with pytest.raises(CanceledError):
            node.fetch(CONTENT)


def test_a_fill_that_is_stopped_does_not_wait_for_its_turn_at_the_bucket(tmp_path: Path) -> None:
    with alone(tmp_path, [SOUND], [SOUND]) as node, ThreadPoolExecutor(1) as thread, ExitStack() as others:
        for _ in range(node.bucket.limit):
            others.enter_context(node.bucket.slot(SIZE, threading.Event()))
        fetched = thread.submit(node.fetch, CONTENT)
        assert node.locating.is_asked.wait(60)
        node.stop.set()
        with pytest.raises(CanceledError):
            fetched.result(60)
        assert counts(node) == (0, 0)


FAULTS = [SOUND, EXPIRED, LIE, truncate(SIZE // 4), ABSENT, BUSY]
scripts = st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4)


@given(store=scripts, mirror=scripts)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bucket_and_mirror_do_the_chunk_is_right_or_there_is_an_error(
    tmp_path: Path, store: list[Fault], mirror: list[Fault]
) -> None:
    with alone(tmp_path, store, mirror) as node:
        for _ in range(2):
            try:
                assert sum(node.fetch(CONTENT).values()) == SIZE
            except BdnError:
                assert (store, mirror) != ([SOUND], [SOUND])
            node.held.chunks.clear()
            node.clock.now += 700
