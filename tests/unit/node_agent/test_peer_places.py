"""What a node that waits for several owners at once asks of each, and when it takes one for slow."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from bdn.core.errors import CanceledError
from node_agent.fetch.peers import Alternative, LateError, Limits, Members, Peers, SourceDeadline
from tests.fakes.clock import Clock
from tests.support.agent.reader_chain import join

LONGEST_SECONDS = 300
GO_ON = threading.Event()
MIB = 1024 * 1024


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(tmp_path: Path, clock: Clock) -> Peers:
    """Four of them, for eight requests together."""
    members = Members("me", tmp_path / "members.json")
    join(members, {name: f"http://{name}" for name in ("me", "a", "b", "c", "d")})
    return Peers(members, 8, clock)


def ask(peers: Peers, peer: str, stop: threading.Event = GO_ON) -> str:
    with peers.place(peer, stop) as is_ours:
        return peer if is_ours else "somebody else"


def test_whoever_asks_for_more_than_a_peers_part_waits_for_a_place_there_and_nowhere_else(peers: Peers) -> None:
    with ThreadPoolExecutor() as threads, ExitStack() as asking:
        held = asking.enter_context(ExitStack())
        held.enter_context(peers.place("a", GO_ON))
        asking.enter_context(peers.place("a", GO_ON))

        third = threads.submit(ask, peers, "a")
        assert threads.submit(ask, peers, "b").result(LONGEST_SECONDS) == "b"
        assert not third.done()

        held.close()
        assert third.result(LONGEST_SECONDS) == "a"


def test_whoever_waits_for_a_place_hears_that_it_is_to_stop(peers: Peers) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor() as threads, peers.place("a", GO_ON), peers.place("a", GO_ON):
        third = threads.submit(ask, peers, "a", stop)
        stop.set()
        with pytest.raises(CanceledError):
            third.result(LONGEST_SECONDS)


def test_whoever_waits_for_a_place_goes_elsewhere_when_somebody_did_not_wait_for_the_answer(peers: Peers) -> None:
    with ThreadPoolExecutor() as threads, peers.place("a", GO_ON), peers.place("a", GO_ON):
        third = threads.submit(ask, peers, "a")
        while not third.done():
            peers.left("a")
        assert third.result(LONGEST_SECONDS) == "somebody else"


def test_a_peer_that_is_avoided_leaves_its_part_to_the_others(peers: Peers) -> None:
    with ThreadPoolExecutor() as threads, peers.place("a", GO_ON), peers.place("a", GO_ON):
        third = threads.submit(ask, peers, "a")
        for peer in ("b", "c", "d"):
            peers.failed(peer)
        assert third.result(LONGEST_SECONDS) == "a"


def wait_for(peers: Peers, waits: ExitStack, owner: str, clock: Clock) -> SourceDeadline:
    """Ask it for a chunk. It may be left for the end of a stage as well as for its limit."""
    limits, is_at_fault = partial(peers.limits, owner, MIB), partial(peers.is_at_fault, owner)
    alternative = Alternative(limits, lambda _: True, is_at_fault, lambda: True)
    deadline = SourceDeadline.of_peer(MIB, GO_ON, alternative, clock)
    waits.enter_context(peers.waited_for(owner, deadline))
    return deadline


def test_an_owner_that_lets_a_node_wait_alone_is_left(peers: Peers, clock: Clock) -> None:
    for _ in range(8):
        peers.served("d", MIB, Limits(1.0, 1.0))
    with ExitStack() as waits:
        slow, other = (wait_for(peers, waits, owner, clock) for owner in "ab")
        other.receiving(1)
        wait_for(peers, waits, "a", clock)  # once more: it is no other owner
        clock.now += 60.0
        slow.at_work()
        with pytest.raises(LateError):
            slow.waiting()


def test_no_owner_is_left_while_others_let_a_node_wait_as_long(peers: Peers, clock: Clock) -> None:
    for _ in range(8):
        peers.served("d", MIB, Limits(1.0, 1.0))
    with ExitStack() as waits:
        all_late = [wait_for(peers, waits, owner, clock) for owner in "abc"]
        clock.now += 60.0
        for deadline in all_late:
            deadline.at_work()
            deadline.waiting()
        all_late[1].receiving(1)
        all_late[2].receiving(1)
        with pytest.raises(LateError):
            all_late[0].waiting()
