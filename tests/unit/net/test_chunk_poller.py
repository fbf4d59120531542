"""Connections that wait: each is resumed once, at the latest when its time has come."""

import socket
import time
from concurrent.futures import Future
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.sending import Wait
from bdn.net.chunk_server.server import Poller, Timers
from tests.support.content.shelves import Shelf
from tests.support.network.hypothesis import BRIEFLY


def test_a_future_that_is_done_while_a_worker_looks_at_its_connection_is_not_missed() -> None:
    """Its callback finds nobody parked; so whoever parks the connection again looks at the future again."""
    ready: list[ChunkConnection] = []
    future = Future[object]()
    wait = Wait(0, time.monotonic() + 60, future)
    client, server = socket.socketpair()
    with client, socket.create_server(("127.0.0.1", 0)) as door:
        connection = ChunkConnection(server, Service(Shelf(), lambda _: None, Timeouts(), None))
        with closing(Poller(door, lambda: True, ready.append)) as poller, closing(connection):
            assert poller.add(connection, wait)
            poller._resume(connection.fileno())  # something else happens to it
            assert ready == [connection]
            future.set_result(None)
            assert ready == [connection]  # a worker has it
            assert poller.add(connection, wait)
            assert ready == [connection, connection]


KEYS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 30)),
    st.tuples(st.just("clear"), KEYS, st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 10)),
)


@BRIEFLY
@given(st.lists(STEPS, max_size=60))
def test_a_key_is_due_once_when_its_last_moment_has_come(steps: list[tuple[str, int, int]]) -> None:
    timers, oracle, now = Timers(), dict[int, float](), 0.0
    for step, key, number in steps:
        match step:
            case "set":
                timers.set(key, now + number)
                oracle[key] = now + number
            case "clear":
                timers.clear(key)
                oracle.pop(key, None)
            case _:
                now += number
                due = {key for key, moment in oracle.items() if moment <= now}
                found = timers.due(now)
                assert sorted(found) == sorted(due)
                oracle = {key: moment for key, moment in oracle.items() if key not in due}
        if oracle:  # who sleeps until then misses nothing
            assert timers.next is not None
            assert timers.next <= min(oracle.values())


def test_a_moment_that_moves_later_again_and_again_costs_one_entry() -> None:
    timers = Timers()
    for number in range(1000):
        timers.set(7, 60.0 + number)
    assert len(timers._heap) == 1
    assert timers.due(1058) == []
    assert timers.due(1059) == [7]
