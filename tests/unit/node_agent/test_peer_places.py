"""A node asks one owner for no more than its part of all requests at once, however many chunks are still missing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bdn.core.errors import CanceledError
from node_agent.fetch.peers import Members, Peers
from tests.support.agent.reader_chain import join

LONGEST_SECONDS = 300
GO_ON = threading.Event()


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    """Four of them, for eight requests together."""
    members = Members("me", tmp_path / "members.json")
    join(members, {name: f"http://{name}" for name in ("me", "a", "b", "c", "d")})
    return Peers(members, 8, lambda: 0.0)


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
