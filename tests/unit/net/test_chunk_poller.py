"""The one race of parked connections that no conversation shows."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future
from contextlib import closing

from bdn.net.chunk_server.connection import ChunkConnection, Service, Timeouts
from bdn.net.chunk_server.poller import Poller
from bdn.net.chunk_server.sending import Wait
from tests.support.content.shelves import Shelf


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
