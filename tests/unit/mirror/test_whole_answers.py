"""Who repairs the store waits for no agent that sends for ever."""

import socket
import threading
import time
from contextlib import closing

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.mirror.upkeep.repair import WholeAnswer
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader


def test_an_answer_that_trickles_is_given_up_although_something_always_comes() -> None:
    over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not over.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        closing(ConnectionPool(timeout_seconds=60)) as pool,
    ):
        thread = threading.Thread(target=trickle, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        reader = HttpChunkReader(pool, url, "grant", deadline=WholeAnswer(time.monotonic() + 0.5))
        with pytest.raises(StoreUnavailableError):
            reader.read_into(PartialChunk(digest_of(b"x"), memoryview(bytearray(1_000_000))))
        over.set()
        thread.join(60)
