"""An answer on its way: who is slow is told from who has stalled, and the server's pace from both. Time is the test's."""

import fcntl
import os
import select
import socket
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bdn.core.pace.retry import StallPolicy
from bdn.net.chunk_server.messages import Response
from bdn.net.chunk_server.sending import EndedError, Pace, Sending, StalledReaderError
from bdn.net.chunk_server.served_chunks import OpenChunk
from tests.support.content.noise import MIB, noise

SIZE = 8 * MIB
CONTENT = noise(SIZE)
SLOWEST = StallPolicy(64 * 1024, 30.0)
RECEIVED = 64 * 1024  # that the client's kernel holds, and doubles


@dataclass
class Talk:
    """A server's and a client's end, and a clock."""

    server: socket.socket
    client: socket.socket
    path: Path
    now: float = 0.0
    asked: list[int] = field(default_factory=list)

    def sending(self, pace: Pace | None = None, size: int = SIZE) -> Sending:
        chunk = OpenChunk(self.path.open("rb"), 0, size)
        return Sending(Response(b"HEAD", is_last=False, size=size), chunk, SLOWEST, pace, lambda: self.now)

    def take(self, size: int) -> bytes:
        """So many bytes as the client, or as many as the server's kernel has."""
        taken = b""
        while len(taken) < size and select.select([self.client], [], [], 60 if self.unacknowledged() else 0)[0]:
            piece = self.client.recv(size - len(taken))
            if not piece:
                break
            taken += piece
        return taken

    def unacknowledged(self) -> int:
        return int.from_bytes(fcntl.ioctl(self.server.fileno(), termios.TIOCOUTQ, bytes(4)), "little")


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    path = tmp_path / "chunk"
    path.write_bytes(CONTENT)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        server.setblocking(False)
        with server:
            yield Talk(server, client, path)


def test_a_reader_that_takes_nothing_in_a_window_has_stalled(talk: Talk) -> None:
    sending = talk.sending()
    wait = sending.advance(talk.server)
    assert wait is not None
    assert (wait.events, wait.until) == (select.EPOLLOUT, 30.0)
    talk.now = 29.0
    assert sending.advance(talk.server) == wait
    talk.now = 30.0
    with pytest.raises(StalledReaderError):
        sending.advance(talk.server)
    sending.close()


def test_a_reader_that_takes_enough_in_every_window_gets_all(talk: Talk) -> None:
    """Also while the socket takes nothing new from us: what counts is what the client's side took."""
    enough = SLOWEST.least_bytes + 2 * RECEIVED  # of which the client's kernel may have had as much as it holds before
    sending, taken = talk.sending(), b""
    while sending.advance(talk.server) is not None:
        talk.server.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, RECEIVED
        )  # less than it has taken: now it takes nothing
        talk.now += 30.0
        taken += talk.take(enough)
    taken += talk.take(SIZE + 4 - len(taken))
    assert taken == b"HEAD" + CONTENT
    assert sending.sent == SIZE
    sending.close()


def test_a_pace_is_asked_once_for_each_piece_and_obeyed(talk: Talk) -> None:
    size = 2_500_000

    def pace(piece: int) -> float:
        talk.asked.append(piece)
        return 10.0

    sending, taken = talk.sending(pace, size), b""
    for number, piece in enumerate((1 << 20, 1 << 20, size - (2 << 20)), 1):
        wait = sending.advance(talk.server)
        assert wait is not None
        assert sending.advance(talk.server) == wait  # looked at by mistake: nobody is charged again
        assert (wait.events, wait.until, len(talk.asked)) == (0, talk.now + 10, number)
        talk.now = wait.until - 1
        assert sending.advance(talk.server) == wait
        talk.now = wait.until
        end = len(taken) + piece + (4 if number == 1 and not taken else 0)
        while len(taken) < end:
            sending.advance(talk.server)
            taken += talk.take(end - len(taken))
    assert sending.advance(talk.server) is None
    assert taken == b"HEAD" + CONTENT[:size]
    assert talk.asked == [1 << 20, 1 << 20, size - (2 << 20)]
    sending.close()


def test_our_own_pace_is_not_held_against_the_reader(talk: Talk) -> None:
    sending = talk.sending(lambda _: 100.0)
    for _ in range(3):
        wait = sending.advance(talk.server)
        assert wait is not None
        if wait.events:
            talk.take(SIZE)
        else:
            talk.now = wait.until
    sending.close()


def test_a_client_that_leaves_while_it_is_paced_is_noticed(talk: Talk) -> None:
    sending = talk.sending(lambda _: 100.0)
    assert sending.advance(talk.server) is not None
    talk.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    talk.client.close()
    select.select([talk.server], [], [], 5)
    with pytest.raises(EndedError):
        sending.advance(talk.server)
    sending.close()


def test_a_file_that_was_cut_ends_the_connection_and_is_never_padded(talk: Talk) -> None:
    sending = talk.sending(size=SIZE)
    os.truncate(talk.path, 1000)
    assert sending.advance(talk.server) is None
    assert sending.is_last
    talk.server.shutdown(socket.SHUT_WR)
    assert talk.take(SIZE) == b"HEAD" + CONTENT[:1000]
    sending.close()
