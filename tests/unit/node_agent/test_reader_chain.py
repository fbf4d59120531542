"""A chunk comes from the owner, from the next owner or from the mirror, and is right whatever they do."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError, CanceledError, ChecksumMismatchError, DiskFailedError
from bdn.core.ring.placement import Placement
from bdn.transfer.chunk_readers import BytesByTier, fetch
from bdn.wire.http_fields import MANIFEST_HEADER
from node_agent.fetch.peers import Limits, Peers
from tests.doubles.faults import Fault, altered, answer, flip_byte, hang, right_after, stall, truncate, work
from tests.support.agent.reader_chain import Bench, bench, join, starts
from tests.support.content.noise import noise
from tests.support.waiting import until

CONTENT = noise(20_000)
SIZE = len(CONTENT)
SOUND, ABSENT, BUSY, LIE = altered({}), answer(404), answer(503), flip_byte()
BROKEN_OFF = truncate(SIZE * 99 // 100)


def know_what_is_usual(peers: Peers) -> None:
    """Chunks of this size came quickly, so that a deadline is as short as one can be."""
    for _ in range(8):
        peers.read(SIZE, Limits(0.01, 0.01))


def test_the_owner_is_asked_and_nobody_else(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT) as ring:
        assert ring.fetch(CONTENT) == {"cluster": SIZE}
        assert (ring.owner.log.count(), ring.second.log.count(), ring.mirror.log.count()) == (1, 0, 0)
        (asked,) = ring.owner.log.find()
        assert asked.headers[MANIFEST_HEADER.lower()] == str(digest_of(CONTENT))
        assert asked.headers["authorization"] == "Bearer grant"


def test_what_the_node_holds_is_not_asked_for(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT) as ring:
        ring.fetch(CONTENT)
        assert ring.fetch(CONTENT) == {"cluster": SIZE}
        assert ring.owner.log.count() == 1


@pytest.mark.parametrize("faults", [[ABSENT], [answer(507)], [BUSY], None], ids=["404", "507", "503", "dead"])
def test_an_owner_that_fails_is_left_at_once_and_avoided(tmp_path: Path, faults: list[Fault] | None) -> None:
    with bench(tmp_path, CONTENT, faults) as ring:
        assert ring.fetch(CONTENT) == {"cluster": SIZE}
        assert (starts(ring.second), starts(ring.mirror)) == ([0], [])
        assert ring.peers.avoided() == (ring.names[0],)
        assert ring.budget.document().retries == 1
        assert ring.budget.document().bytes_hedged == 0


def test_an_avoided_owner_is_not_asked_and_later_is_again(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, [BUSY, SOUND]) as ring:
        for later, asked in ((0, 1), (0, 1), (1000, 2)):
            ring.clock.now += later
            ring.fetch(CONTENT)
            ring.held.chunks.clear()
            assert ring.owner.log.count() == asked


@pytest.mark.promise("corruption")
def test_an_owner_that_lies_is_found_out_and_the_whole_comes_from_the_mirror(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, [LIE], [ABSENT]) as ring:
        assert ring.fetch(CONTENT) == {"mirror": SIZE}
        assert starts(ring.mirror) == [0]
        assert len(ring.mismatches) == 1
        ring.clock.now += 20  # longer than a failure is held against a peer
        assert ring.peers.avoided() == (ring.names[0],)


@pytest.mark.promise("corruption")
def test_of_two_who_sent_a_wrong_chunk_together_both_are_suspected(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, [BROKEN_OFF], [LIE]) as ring:
        assert ring.fetch(CONTENT) == {"mirror": SIZE}
        assert starts(ring.mirror) == [0]
        assert ring.peers.avoided() == tuple(sorted(ring.names))


@pytest.mark.promise("corruption")
def test_a_mirror_that_lies_twice_is_an_error(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, None, None, [LIE]) as ring, pytest.raises(ChecksumMismatchError):
        ring.fetch(CONTENT)


def test_what_came_before_an_owner_broke_off_is_kept_and_the_rest_asked_for_elsewhere(tmp_path: Path) -> None:
    came = SIZE * 99 // 100
    with bench(tmp_path, CONTENT, [BROKEN_OFF], [ABSENT]) as ring:
        assert ring.fetch(CONTENT) == {"cluster": came, "mirror": SIZE - came}
        assert starts(ring.mirror) == [came]


def test_an_owner_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, [], [ABSENT]) as ring:
        ring.owner.fail(hang(before=lambda: ring.clock.advance(11)))
        assert ring.fetch(CONTENT) == {"mirror": SIZE}
        assert ring.budget.document().retries == 1


def test_an_owner_is_waited_for_as_long_as_it_says_that_it_works(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT, [work()], [ABSENT]) as ring:
        ring.clock.step = 0.05  # a hundred signs of life take longer than it may be silent
        assert ring.fetch(CONTENT) == {"cluster": SIZE}
        assert ring.mirror.log.count() == 0


@contextmanager
def fetching_from_an_owner_that_stalls(ring: Bench) -> Iterator[Future[BytesByTier]]:
    """Time stands until its first byte has come: how long that takes is the machine's business."""
    know_what_is_usual(ring.peers)
    with ThreadPoolExecutor(1) as threads:
        fetched = threads.submit(ring.fetch, CONTENT)
        try:
            asyncio.run(until(lambda: ring.arriving.received))
            yield fetched
        finally:
            ring.owner.go_on.set()


def test_an_owner_that_trickles_is_left_at_its_deadline_with_what_came(tmp_path: Path) -> None:
    with (
        bench(tmp_path, CONTENT, [stall(1)], [ABSENT]) as ring,
        fetching_from_an_owner_that_stalls(ring) as fetched,
    ):
        ring.clock.advance(5)
        assert fetched.result(60) == {"cluster": 1, "mirror": SIZE - 1}
        assert ring.budget.document().bytes_hedged == SIZE - 1


def test_no_more_is_asked_for_twice_than_the_stage_allows(tmp_path: Path) -> None:
    with (
        bench(tmp_path, CONTENT, [stall(1)], stage_size=SIZE) as ring,
        fetching_from_an_owner_that_stalls(ring) as fetched,
    ):
        ring.clock.advance(5)
        asyncio.run(until(lambda: ring.peers.avoided() == (ring.names[0],)))  # it is late, and may not be left
        ring.clock.advance(1000)
        assert fetched.result(60) == {"cluster": SIZE}  # in the end it counts as a failure
        assert ring.budget.document().bytes_hedged == 0
        assert ring.budget.document().retries == 1


def content_owned_by_the_last_and_next_by_me(root: Path) -> bytes:
    """Among the members ``me``, ``n`` and ``z``: ``n`` asks ``z`` first, and the mirror is all that is left to ``me``."""
    for number in range(1000):
        content = noise(SIZE, number)
        digest = digest_of(content)
        owners = Placement([digest], ["me", "n", "z"]).owners(0, 3)
        if owners[:2] == ("z", "me"):
            return content
    raise AssertionError("none of a thousand")


@pytest.mark.parametrize(
    ("holder", "came", "mirror"),
    [(SOUND, "cluster", 0), (ABSENT, "mirror", 1)],
    ids=["held", "not held"],
)
def test_where_the_owner_fails_who_asked_it_before_us_is_asked_for_what_it_holds(
    tmp_path: Path, holder: Fault, came: str, mirror: int
) -> None:
    content = content_owned_by_the_last_and_next_by_me(tmp_path)
    with bench(tmp_path, content, [BUSY], [holder]) as ring:
        members = {"me": ring.mirror.url, "n": ring.second.url, "z": ring.owner.url}
        join(ring.members, members)
        assert ring.fetch(content) == {came: SIZE}
        assert (ring.owner.log.count(), ring.second.log.count(), ring.mirror.log.count()) == (1, 1, mirror)
        assert MANIFEST_HEADER.lower() not in ring.second.log.find()[0].headers
        assert ring.peers.avoided() == ("z",)


@contextmanager
def no_place_at(ring: Bench) -> Iterator[None]:
    """Other threads of this node ask both peers for all that they may be asked for at once."""
    with ExitStack() as asking:
        for peer in ring.names * 16:
            asking.enter_context(ring.peers.place(peer, ring.stop))
        yield


def test_a_chunk_waits_for_a_place_at_its_owner_and_goes_elsewhere_when_another_thread_left_it(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT) as ring, ThreadPoolExecutor() as threads, no_place_at(ring):
        fetched = threads.submit(ring.fetch, CONTENT)
        asyncio.run(until(lambda: ring.arriving.step == "owner"))
        while not fetched.done():
            for peer in ring.names:
                ring.peers.left(peer)
        assert fetched.result() == {"mirror": SIZE}
        assert (starts(ring.owner), starts(ring.second)) == ([], [])


def test_who_owns_a_chunk_asks_whether_others_hold_it_without_a_place(tmp_path: Path) -> None:
    """It holds its own place at the mirror, for which others may wait who hold those places."""
    names = ["me", "a", "b"]
    mine = next(
        one
        for one in (noise(SIZE, number) for number in count())
        if Placement([digest_of(one)], names).owner(0) == "me"
    )
    with bench(tmp_path, mine, mirror=[BUSY]) as ring, no_place_at(ring):
        join(ring.members, {"me": "http://me", ring.names[0]: ring.owner.url, ring.names[1]: ring.second.url})
        assert ring.fetch(mine) == {"cluster": SIZE}


@pytest.mark.parametrize("owner", [BROKEN_OFF, ABSENT], ids=["in part", "not at all"])
def test_what_is_damaged_here_does_not_get_into_what_came_from_elsewhere(tmp_path: Path, owner: Fault) -> None:
    with bench(tmp_path, CONTENT, [owner], [ABSENT]) as ring:
        ring.held.chunks[digest_of(CONTENT)] = bytes(SIZE)  # it is looked for here again before the mirror is asked
        assert ring.fetch(CONTENT)["mirror"]


def test_a_chunk_that_cannot_be_kept_fails_and_leaves_the_lead(tmp_path: Path) -> None:
    def store() -> None:
        raise DiskFailedError("/", "no space")

    with bench(tmp_path, CONTENT, None, None) as ring:
        with pytest.raises(DiskFailedError):
            fetch(ring.reader, digest_of(CONTENT), memoryview(bytearray(SIZE)), store)
        assert ring.fetch(CONTENT) == {"mirror": SIZE}


def test_two_threads_of_one_node_read_the_mirror_once(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    def stop_and_go() -> None:
        entered.set()
        assert go.wait(20)

    with bench(tmp_path, CONTENT, None, None, [right_after(stop_and_go)]) as ring:
        came: list[object] = []
        threads = [threading.Thread(target=lambda: came.append(ring.fetch(CONTENT))) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert entered.wait(20)
        go.set()
        for thread in threads:
            thread.join(20)
        assert ring.mirror.log.count() == 1
        assert sorted(came, key=str) == [{"cluster": SIZE}, {"mirror": SIZE}]


def test_a_fill_that_is_stopped_does_not_wait_for_a_silent_peer(tmp_path: Path) -> None:
    with bench(tmp_path, CONTENT) as ring:
        ring.owner.fail(hang(before=ring.stop.set))
        with pytest.raises(CanceledError):
            ring.fetch(CONTENT)


FAULTS = [SOUND, LIE, truncate(SIZE // 4), BROKEN_OFF, ABSENT, BUSY]
scripts = st.lists(st.sampled_from(FAULTS), min_size=1, max_size=4)


@given(owner=scripts, second=scripts, mirror=scripts)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_sources_do_the_chunk_is_right_or_there_is_an_error(
    tmp_path: Path, owner: list[Fault], second: list[Fault], mirror: list[Fault]
) -> None:
    with bench(tmp_path, CONTENT, owner, second, mirror, stage_size=SIZE) as ring:
        for _ in range(2):
            try:
                assert sum(ring.fetch(CONTENT).values()) == SIZE
            except BdnError:
                assert mirror != [SOUND]
            ring.held.chunks.clear()
            ring.clock.now += 700
        spent = ring.budget.document()
        assert spent.bytes_hedged <= SIZE // 20
        assert spent.retries + spent.retries_left == 64
