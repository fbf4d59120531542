"""Answers over a socket: whatever the pieces in which they arrive, the body is exactly what was sent, or an error."""

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdn.core.pace.retry import StallPolicy
from bdn.net.http1 import answer as module
from bdn.net.http1.answer import HEAD_LIMIT, Answer, StalledError, ask
from bdn.net.http1.connection import Connection, NoAnswerError, ProtocolError
from tests.support.network.hypothesis import BRIEFLY
from tests.support.network.raw_server import message

BODY = bytes(range(256)) * 4
WHOLE = message("200 OK", f"Content-Length: {len(BODY)}", body=BODY)
PIECES = message(
    "200 OK", "Transfer-Encoding: chunked", body=b"100\r\n%s\r\n2FF;why=not\r\n%s\r\n1\r\n%s\r\n0\r\nTrailer: x\r\n\r\n"
    % (BODY[:256], BODY[256:1023], BODY[1023:])
)  # fmt: skip


class Line:
    """A connection, and the other end of it."""

    def __init__(self) -> None:
        ours, self.server = socket.socketpair()
        self.connection = Connection(ours, 10)

    def ask(self, sent: bytes = b"", *, then_end: bool = False, expected: int = 0) -> Answer:
        """The answer, of which ``sent`` arrives before it is awaited."""
        self.server.sendall(sent)
        if then_end:
            self.server.shutdown(socket.SHUT_WR)
        return ask(self.connection, b"GET / HTTP/1.1\r\n\r\n", 10, expected)

    @contextmanager
    def sending(self, *pieces: bytes, pause_seconds: float = 0) -> Iterator[None]:
        """These arrive one after the other while the block reads, unless it has had enough and closes the connection."""

        def send() -> None:
            for piece in pieces:
                self.server.sendall(piece)
                time.sleep(pause_seconds)

        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(send)
            yield
            assert isinstance(sent.exception(), ConnectionError | None)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    with made.server:
        yield made
        made.connection.close()


def filled(answer: Answer, size: int) -> bytes:
    """What ``fill`` leaves in a buffer of ``size`` bytes."""
    buffer = bytearray(b"\xee" * size)
    return bytes(buffer[: answer.fill(memoryview(buffer))])


@pytest.mark.parametrize("sent", [WHOLE, PIECES])
@pytest.mark.parametrize("expected", [0, len(BODY), 1 << 30])
def test_a_body_is_read_to_its_end_and_the_connection_is_good_for_another(
    line: Line, sent: bytes, expected: int
) -> None:
    for _ in range(2):
        answer = line.ask(sent, expected=expected)
        assert filled(answer, len(BODY)) == BODY
        assert answer.has_ended()
        assert answer.keeps_alive
        assert answer.received == len(BODY)


@settings(BRIEFLY, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sent=st.sampled_from([WHOLE, PIECES]),
    cuts=st.lists(st.integers(1, len(PIECES) - 1), max_size=8),
    reads=st.integers(1, 600),
)
def test_it_does_not_matter_in_which_pieces_an_answer_arrives(sent: bytes, cuts: list[int], reads: int) -> None:
    line, places = Line(), sorted({0, *(cut for cut in cuts if cut < len(sent)), len(sent)})
    # Each piece is sent when the one before it was taken, because the other end of a pair holds almost nothing.
    line.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with line.server, line.sending(*(sent[a:b] for a, b in pairwise(places))):
        answer, body = line.ask(), b""
        while len(body) < len(BODY):
            body += filled(answer, min(reads, len(BODY) - len(body)))
        assert body == BODY
        assert answer.has_ended()
        assert answer.keeps_alive
    line.connection.close()


@pytest.mark.parametrize("sent", [WHOLE, PIECES])
def test_what_comes_behind_an_answer_makes_its_connection_useless(line: Line, sent: bytes) -> None:
    """Nobody asked for it: the next answer on this connection could be anything."""
    answer = line.ask(sent + b"HTTP/1.1 200 OK\r\n")
    assert filled(answer, len(BODY)) == BODY
    assert answer.has_ended()
    assert not answer.keeps_alive


def test_a_body_that_was_not_read_to_its_end_keeps_no_connection(line: Line) -> None:
    answer = line.ask(WHOLE)
    filled(answer, len(BODY) - 1)
    assert not answer.has_ended()
    assert not line.ask(PIECES).keeps_alive


def test_a_body_of_unknown_length_ends_with_its_connection(line: Line) -> None:
    answer = line.ask(message("200 OK", body=BODY), then_end=True)
    assert answer.length is None
    assert filled(answer, 2 * len(BODY)) == BODY
    assert answer.has_ended()
    assert not answer.keeps_alive


def test_of_a_body_whose_connection_ends_early_what_came_is_counted(line: Line) -> None:
    answer = line.ask(WHOLE[:-10], then_end=True)
    assert filled(answer, len(BODY)) == BODY[:-10]
    assert answer.received == len(BODY) - 10
    assert not answer.keeps_alive


@pytest.mark.parametrize(
    "end", [b"", b"1", b"10\r\nabc", b"3\r\nabc", b"3\r\nabc\r\n", b"0\r\n", b"0\r\nTrailer: x\r\n"]
)
def test_pieces_that_break_off_are_not_the_end_of_the_body(line: Line, end: bytes) -> None:
    answer = line.ask(message("200 OK", "Transfer-Encoding: chunked", body=end), then_end=True)
    with pytest.raises(ConnectionError):
        answer.read(100)


@pytest.mark.parametrize("piece", [
    b"\r\n", b"x\r\n", b"-1\r\n", b"+3\r\nabc", b" 3\r\nabc", b"0x3\r\nabc", b"3 \r\nabc\r\n", b"3\nabc", b"1_0\r\n",
    b"3\r\nabcd\r\n", b"3\r\nabc\n0\r\n\r\n", b"3;a\rb\r\nabc", b"3;a\x00\r\nabc", b"f" * 16 + b"\r\n",
    b"3;" + b"x" * 5000 + b"\r\nabc\r\n0\r\n\r\n", b"0\r\n" + b"x: y\r\n" * 12_000 + b"\r\n",
])  # fmt: skip
def test_pieces_that_are_not_as_they_must_be_are_refused(line: Line, piece: bytes) -> None:
    sent = message("200 OK", "Transfer-Encoding: chunked", body=piece)
    with line.sending(sent + b"2\r\nab\r\n0\r\n\r\n"):
        with pytest.raises(ProtocolError):
            line.ask().read(100)
        line.connection.close()


def test_answers_before_the_answer_are_skipped(line: Line) -> None:
    early = message("100 Continue") + message("103 Early Hints", "Link: </x>; rel=preload")
    assert filled(line.ask(early + WHOLE), len(BODY)) == BODY


@pytest.mark.parametrize("sent", [message("101 Switching Protocols"), message("103 Early Hints") * 16 + WHOLE])
def test_an_answer_that_never_begins_is_refused(line: Line, sent: bytes) -> None:
    with pytest.raises(ProtocolError, match="only interim responses"):
        line.ask(sent)


def head_of(size: int) -> bytes:
    short = message("200 OK", "Content-Length: 0", "X: ")
    return short[:-4] + b"x" * (size - len(short)) + short[-4:]


@pytest.mark.parametrize("sent", [head_of(HEAD_LIMIT), head_of(HEAD_LIMIT + 1), head_of(300_000)[:-4]])
def test_a_head_may_be_as_long_as_the_limit_and_no_longer(line: Line, sent: bytes) -> None:
    """Also when its end and what is too much arrive together."""
    with line.sending(sent):
        if len(sent) <= HEAD_LIMIT:
            assert line.ask(expected=64 * 1024).status == 200
        else:
            with pytest.raises(ProtocolError, match=f"longer than {HEAD_LIMIT}"):
                line.ask(expected=64 * 1024)
        line.connection.close()


def test_a_server_that_says_nothing_gave_no_answer(line: Line) -> None:
    with pytest.raises(NoAnswerError, match="closed connection without response"):
        line.ask(then_end=True)


def test_a_server_that_hangs_up_inside_the_head_had_begun_to_answer() -> None:
    for begun in (b"HTTP/1.1 200 OK\r\n", message("103 Early Hints")):
        line = Line()
        with line.server, pytest.raises(ConnectionResetError, match="ended inside the answer") as raised:
            line.ask(begun, then_end=True)
        line.connection.close()
        assert not isinstance(raised.value, NoAnswerError)


def test_a_request_that_cannot_be_sent_gave_no_answer(line: Line) -> None:
    line.server.close()
    with pytest.raises(NoAnswerError):
        ask(line.connection, b"GET / HTTP/1.1\r\n\r\n", 10)


def test_a_head_that_trickles_does_not_take_for_ever(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time; the head does not."""
    hours = iter(range(0, 100_000, 4))
    monkeypatch.setattr("bdn.net.http1.connection.time.monotonic", lambda: float(next(hours)))
    line.server.sendall(b"HTTP")
    monkeypatch.setattr(Connection, "_receive", lambda *_: b"x")
    with pytest.raises(TimeoutError):
        ask(line.connection, b"GET / HTTP/1.1\r\n\r\n", 10)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_an_answer_without_a_body_ends_at_once(line: Line, status: str) -> None:
    answer = line.ask(message(status, "Content-Length: 10"))
    assert answer.has_ended()
    assert answer.read(10) == b""
    assert answer.keeps_alive


def test_a_wait_is_over_when_its_time_is(line: Line) -> None:
    answer = line.ask(message("200 OK", "Content-Length: 10", body=b"12345"))
    line.connection.set_timeout(0.01)
    buffer = bytearray(10)
    with pytest.raises(TimeoutError, match="timed out"):
        answer.fill(memoryview(buffer))
    assert (bytes(buffer[:5]), answer.received) == (b"12345", 5)


def test_a_body_that_stalls_is_left_after_a_window_with_what_came(line: Line) -> None:
    answer, shown = line.ask(message("200 OK", "Content-Length: 10", body=b"12345")), bytearray()
    buffer = bytearray(10)
    with pytest.raises(StalledError, match="stalled: 5 bytes"):
        answer.fill(memoryview(buffer), StallPolicy(6, 0.01), on_bytes=shown.extend)
    assert (bytes(buffer[:5]), answer.received, bytes(shown)) == (b"12345", 5, b"12345")


def test_a_body_that_pauses_for_less_than_a_window_is_waited_for(line: Line) -> None:
    answer = line.ask(message("200 OK", "Content-Length: 10", body=b"12345"))
    moments = iter([0.0, 0.001, 0.005])  # the window's begin, after the first bytes, after a wait in which nothing came

    def clock() -> float:
        moment = next(moments)
        if moment == 0.005:
            line.server.sendall(b"67890")
        return moment

    buffer = bytearray(10)
    assert answer.fill(memoryview(buffer), StallPolicy(5, 0.01), clock) == 10
    assert bytes(buffer) == b"1234567890"
    assert next(moments, None) is None


@settings(BRIEFLY, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len(BODY)), piece=st.integers(1, len(BODY) + 5), is_chunked=st.booleans())
def test_a_body_is_shown_in_order_and_completely_also_when_it_breaks_off(
    cut: int, piece: int, is_chunked: bool
) -> None:
    line, shown = Line(), bytearray()
    sent = PIECES if is_chunked else WHOLE[: len(WHOLE) - len(BODY) + cut]
    with pytest.MonkeyPatch.context() as patch, line.server:
        patch.setattr(module, "_PIECE", piece)
        answer = line.ask(sent, then_end=not is_chunked)
        buffer = bytearray(len(BODY))
        answer.fill(memoryview(buffer), on_bytes=shown.extend)
        line.connection.close()
    assert answer.received == len(shown)
    assert shown == BODY[: len(shown)]
    assert len(shown) == (len(BODY) if is_chunked else cut)


class TcpLine(Line):
    """The same over loopback, where the kernel knows of ``SO_RCVLOWAT``."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            self.server, _ = listener.accept()
        self.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(ours, 10)


@pytest.fixture
def tcp() -> Iterator[TcpLine]:
    made = TcpLine()
    with made.server:
        yield made
        made.connection.close()


@pytest.mark.parametrize("size", [60_000, 64 * 1024, 600_000, 3 * 1024**2 + 1])
@pytest.mark.parametrize("piece", [7_001, 300_000])
def test_a_body_in_packets_comes_completely_and_the_next_answer_is_heard_at_once(
    tcp: TcpLine, size: int, piece: int
) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    pieces = [body[start : start + piece] for start in range(0, size, piece)]
    answer = tcp.ask(message("200 OK", f"Content-Length: {size}"))
    with tcp.sending(*pieces):
        assert filled(answer, size) == body
    assert answer.keeps_alive
    assert tcp.ask(message("204 No Content")).status == 204
    assert (
        tcp.connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    )  # or a head would be waited for in vain


class Watched:
    """A poll object that remembers how its waits ended."""

    def __init__(self, inner: select.poll) -> None:
        self.inner = inner
        self.ends: list[bool] = []

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        events = self.inner.poll(milliseconds)
        self.ends.append(bool(events))
        return events


def test_the_end_of_a_large_body_is_not_waited_for_in_vain(tcp: TcpLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is less than what is slept for otherwise."""
    size = 1024**2
    answer = tcp.ask(message("200 OK", f"Content-Length: {size}"))
    watched = Watched(tcp.connection._poll)
    monkeypatch.setattr(tcp.connection, "_poll", watched)
    tcp.connection.set_timeout(1.0)
    with tcp.sending(bytes(size - 100_000), bytes(100_000)):
        assert len(filled(answer, size)) == size
    assert watched.ends
    assert all(watched.ends)


def test_nothing_sleeps_for_more_than_the_few_bytes_that_are_left(tcp: TcpLine) -> None:
    size = 1024**2 + 10  # a piece that is shown at once, and ten bytes
    answer = tcp.ask(message("200 OK", f"Content-Length: {size}"))
    with tcp.sending(bytes(size)):
        answer.fill(memoryview(bytearray(size)), on_bytes=bytearray().extend)
    assert tcp.connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) <= 10


def test_of_a_large_body_that_stalls_what_came_is_there(tcp: TcpLine) -> None:
    answer = tcp.ask(message("200 OK", "Content-Length: 1000000", body=b"x" * 1000))
    with pytest.raises(StalledError):
        answer.fill(memoryview(bytearray(1_000_000)), StallPolicy(1 << 20, 0.01))
    assert answer.received == 1000


def test_who_receives_a_large_body_is_not_woken_up_for_each_packet(tcp: TcpLine) -> None:
    size, packets = 1024**2, 64
    seen: list[int] = []
    answer = tcp.ask(message("200 OK", f"Content-Length: {size}"))

    def look() -> bool:
        seen.append(answer.received)
        return True

    with tcp.sending(*[bytes(size // packets)] * packets, pause_seconds=0.001):
        answer.fill(memoryview(bytearray(size)), is_wanted=look)
    assert answer.received == size
    assert len(seen) < packets // 4
