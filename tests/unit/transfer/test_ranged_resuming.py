"""A connection that breaks or stalls inside a body costs nothing of what it brought: the rest is asked for on another one."""

from collections.abc import Callable
from contextlib import closing, suppress
from select import select
from socket import MSG_PEEK, socket
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bdn.core.chunk import ByteRange
from bdn.core.errors import (
    BdnError,
    CanceledError,
    SourceChangedError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.pace.retry import ResumePolicy, StallPolicy
from bdn.core.source.upstream import Location
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.ranged import LocationRefusedError, RangedReader, RangeRequest
from tests.doubles import faults
from tests.doubles.http_origin import Answer
from tests.fakes.clock import Clock
from tests.support.network.hypothesis import BRIEFLY
from tests.support.network.raw_server import Play, RawServer, answering, message, partial, read_head, resetting_after
from tests.support.network.upstream import CONTENT, SIZE, SOURCE, read_range, upstream

WINDOW = StallPolicy(least_bytes=100, window_seconds=0.03)
HEAD = len(partial(CONTENT[:1000], 0, SIZE)) - 1000


def good(start: int, stop: int = 1000, *headers: str) -> bytes:
    """The right answer for these bytes of the file."""
    return partial(CONTENT[start:stop], start, SIZE, *headers)


class Outcome(NamedTuple):
    content: bytes  # of the buffer, also after an error
    error: BdnError | None
    asked: list[str]  # the Range of each request


def read(
    *plays: Play,
    resume: ResumePolicy | None = None,
    stall: StallPolicy = WINDOW,
    etag: str | None = None,
    goes_on: Callable[[int], bool] | None = None,
) -> Outcome:
    """The first 1000 bytes from a server that plays one play per connection."""
    asked: list[str] = []
    buffer = bytearray(b"\xee" * 1000)
    error: BdnError | None = None
    noted = [noting(play, asked) for play in plays]
    with closing(ConnectionPool(timeout_seconds=5)) as pool, RawServer(*noted) as server:
        reader = RangedReader(pool, resume or ResumePolicy(), stall)
        request = RangeRequest(SOURCE, "file", ByteRange(0, 1000), SIZE)
        try:
            reader.read_into(Location(server.url, etag=etag), request, memoryview(buffer), goes_on)
        except BdnError as caught:
            error = caught
    return Outcome(bytes(buffer), error, asked)


def range_of(connection: socket) -> str:
    """The Range of the request that is waiting to be read."""
    head = connection.recv(4096, MSG_PEEK).decode()
    return next(line for line in head.split("\r\n") if line.startswith("Range: "))[7:]


def start_of(connection: socket) -> int:
    return int(range_of(connection).removeprefix("bytes=").partition("-")[0])


def noting(play: Play, asked: list[str]) -> Play:
    """The play; what its first request asks for is noted."""

    def playing(connection: socket) -> None:
        asked.append(range_of(connection))
        play(connection)

    return playing


def stalling_after(content: bytes) -> Play:
    """Nothing more comes, and the connection stays until the client ends it."""

    def play(connection: socket) -> None:
        read_head(connection)
        connection.sendall(content)
        connection.recv(1)

    return play


@pytest.mark.parametrize("brought", [1, 500, 990, 999])
@pytest.mark.parametrize("end", [answering, resetting_after, stalling_after])
def test_the_rest_is_asked_for_where_the_first_connection_left_off(brought: int, end: object) -> None:
    """It ended, was reset (also at 99 %), or stalled."""
    first: Play = end(good(0)[: HEAD + brought])  # type: ignore[operator]
    outcome = read(first, answering(good(brought)))
    assert outcome == (CONTENT[:1000], None, ["bytes=0-999", f"bytes={brought}-999"])


def test_how_much_is_there_is_told_as_it_comes_and_at_the_end_also_of_what_was_gone_on_with() -> None:
    told: list[int] = []

    def goes_on(received: int) -> bool:
        told.append(received)
        return True

    plays = resetting_after(good(0)[: HEAD + 600]), answering(good(600))
    assert read(*plays, goes_on=goes_on).error is None
    assert (told == sorted(told), 600 in told, told[-1]) == (True, True, 1000)


def test_pieces_of_unknown_length_are_gone_on_with_too() -> None:
    begun = message(
        "206 Partial Content", "Content-Range: bytes 0-999/4096", "Transfer-Encoding: chunked",
        body=b"64\r\n" + CONTENT[:100] + b"\r\n384\r\n" + CONTENT[100:150],
    )  # fmt: skip
    assert read(answering(begun), answering(good(150))) == (CONTENT[:1000], None, ["bytes=0-999", "bytes=150-999"])


CHUNKED = message("206 Partial Content", "Content-Range: bytes 0-999/4096", "Transfer-Encoding: chunked")
ENDS: dict[str, tuple[list[Play], str, list[str]]] = {
    "wrongly framed": ([answering(CHUNKED + b"64\r\n" + CONTENT[:100] + b"!!"), answering(good(100))], "", ["bytes=0-999"]),
    "all bytes without the end": (
        [answering(CHUNKED + b"3E8\r\n" + CONTENT[:1000] + b"\r\n"), answering(good(0))], "ended inside the answer", ["bytes=0-999"]),
    "no answer": ([answering(b""), answering(good(0))], "closed connection without response", ["bytes=0-999"]),
    "nothing": ([answering(good(0)[:HEAD]), answering(good(0))], "ended after 0", ["bytes=0-999"]),
    "a reset and nothing": ([resetting_after(good(0)[:HEAD]), answering(good(0))], "reset by peer", ["bytes=0-999"]),
    "a stall and nothing": ([stalling_after(good(0)[:HEAD]), answering(good(0))], "stalled: 0 bytes", ["bytes=0-999"]),
    "nothing more": ([answering(good(0)[: HEAD + 10]), answering(good(10)[:HEAD]), answering(good(10))],
        "ended after 10 of 1000 bytes", ["bytes=0-999", "bytes=10-999"]),
    "hardly anything in two stalls": (
        [stalling_after(good(0)[: HEAD + 50]), stalling_after(good(50)[: HEAD + 20]), answering(good(70))],
        "stalled: ", ["bytes=0-999", "bytes=50-999"]),
}  # fmt: skip


@pytest.mark.parametrize(("plays", "said", "asked"), ENDS.values(), ids=ENDS)
def test_an_attempt_ends_with_a_connection_that_brings_too_little(
    plays: list[Play], said: str, asked: list[str]
) -> None:
    outcome = read(*plays)
    assert isinstance(outcome.error, UpstreamUnavailableError)
    assert outcome.error.transient
    assert said in str(outcome.error)
    assert outcome.asked == asked


def test_there_is_a_limit_to_how_often_one_range_is_gone_on_with() -> None:
    plays = [answering(good(start)[: len(good(start)) - 1000 + start + 1]) for start in range(4)]
    outcome = read(*plays, resume=ResumePolicy(resumes=3))
    assert isinstance(outcome.error, UpstreamUnavailableError)
    assert outcome.asked == [f"bytes={start}-999" for start in range(4)]


def test_a_stall_after_many_bytes_is_no_poor_one() -> None:
    outcome = read(
        stalling_after(good(0)[: HEAD + 50]), stalling_after(good(50)[: HEAD + 200]), answering(good(250))
    )  # fmt: skip
    assert outcome.error is None
    assert outcome.content == CONTENT[:1000]


def trickling(connection: socket) -> None:
    """A byte every few milliseconds, from wherever the client goes on, which never times out, until it has had enough."""
    start = start_of(connection)
    read_head(connection)
    connection.sendall(good(start)[: start - 1000])
    for at in range(start, 1000):
        connection.sendall(CONTENT[at : at + 1])
        if select([connection], [], [], 0.004)[0]:
            return


def test_a_trickle_is_cut_and_then_goes_up() -> None:
    """The first is cut after a window, and keeps what it brought."""
    with closing(ConnectionPool(timeout_seconds=5)) as pool, RawServer(trickling, trickling) as server:
        with pytest.raises(UpstreamUnavailableError, match=r"stalled: [0-9]+ bytes in"):
            read_range(RangedReader(pool, stall=WINDOW), Location(server.url), 0, 1000)
        assert server.connections == 2


ANSWERS: list[tuple[bytes, type[BdnError]]] = [
    (message("200 OK", f"Content-Length: {SIZE}", body=CONTENT), UpstreamUnavailableError),
    (good(99), UpstreamUnavailableError),  # from one byte before
    (good(0), UpstreamUnavailableError),  # the range that was asked for first
    (partial(CONTENT[100:999], 100, SIZE), UpstreamUnavailableError),
    (partial(CONTENT[100:1000], 100, SIZE + 1), SourceChangedError),
    (message("412 Precondition Failed", "Content-Length: 0"), SourceChangedError),
    (message("404 Not Found", "Content-Length: 0"), SourceChangedError),
    (message("403 Forbidden", "Content-Length: 0"), LocationRefusedError),  # a signed address that expired meanwhile
    (message("429 Too Many", "Retry-After: 2", "Content-Length: 0"), UpstreamRateLimitedError),
    (message("503 Busy", "Retry-After: 2", "Content-Length: 0"), UpstreamUnavailableError),
    (good(100, 1000, 'ETag: "v2"'), UpstreamUnavailableError),
]


@pytest.mark.parametrize(("second", "expected"), ANSWERS)
def test_an_answer_for_the_rest_is_judged_as_strictly_as_the_first(second: bytes, expected: type[BdnError]) -> None:
    first = good(0, 1000, 'ETag: "v1"')
    outcome = read(answering(first[: len(first) - 900]), answering(second))
    assert type(outcome.error) is expected
    assert outcome.content[100:] == b"\xee" * 900, "nothing of it is in the buffer"


@pytest.mark.parametrize(("first", "second", "listed", "expected", "said"), [
    ('ETag: "v1"', 'ETag: "v2"', None, UpstreamUnavailableError, "different ETags"),
    ('ETag: "v1"', "X: no etag", None, UpstreamUnavailableError, "different ETags"),
    ("X: no etag", 'ETag: "v2"', None, UpstreamUnavailableError, "different ETags"),
    ('ETag: "v1"', 'ETag: "v2"', '"v1"', SourceChangedError, "its ETag changed"),
])  # fmt: skip
def test_two_versions_are_never_put_together_even_where_no_etag_was_listed(
    first: str, second: str, listed: str | None, expected: type[BdnError], said: str
) -> None:
    begun = good(0, 1000, first)
    outcome = read(answering(begun[: len(begun) - 900]), answering(good(100, 1000, second)), etag=listed)
    assert isinstance(outcome.error, expected)
    assert said in str(outcome.error)


def test_the_rest_is_asked_for_with_the_same_pin_and_the_same_credentials() -> None:
    with upstream(resume=ResumePolicy()) as source:
        source.script.add(faults.truncate(100))
        headers = {"If-Match": '"v1"', "Authorization": "Bearer secret"}
        assert source.read(0, 1000, headers=headers, etag='"v1"') == CONTENT[:1000]
        first, second = source.heard
        assert (first.headers["range"], second.headers["range"]) == ("bytes=0-999", "bytes=100-999")
        assert {**first.headers, "range": ""} == {**second.headers, "range": ""}


def test_the_rest_is_asked_for_at_the_location_and_not_where_it_was_redirected_to() -> None:
    """The address behind a redirect may be signed for minutes."""
    with upstream(resume=ResumePolicy()) as source:
        source.respond["/file"] = lambda _: Answer(302, {"Location": f"{source.other.url}/moved"})
        source.script.add(faults.truncate(100), origin="other")
        assert source.read(0, 1000) == CONTENT[:1000]
        assert [request.target for request in source.heard] == ["/file", "/moved"] * 2


def failing(kind: str, brought: int) -> Play:
    """Answers whatever range is asked for, but not to its end."""

    def play(connection: socket) -> None:
        start = start_of(connection)
        whole = good(start)
        sent = whole[: len(whole) - max(1, 1000 - start - brought)]
        match kind:
            case "end":
                answering(sent)(connection)
            case "reset":
                resetting_after(sent)(connection)
            case "shifted":
                answering(partial(CONTENT[start + 1 : 1001], start + 1, SIZE))(connection)
            case _:
                answering(message("503 Busy", "Content-Length: 0"))(connection)

    return play


def sound(connection: socket) -> None:
    """Answers whatever range is asked for, rightly."""
    answering(good(start_of(connection)))(connection)


@settings(BRIEFLY, max_examples=60)
@given(
    failures=st.lists(
        st.tuples(st.sampled_from(["end", "end", "reset", "reset", "shifted", "busy"]), st.integers(0, 400)), max_size=6
    )
)
def test_however_connections_fail_the_bytes_are_right_or_there_is_an_error(failures: list[tuple[str, int]]) -> None:
    outcome = read(*(failing(kind, brought) for kind, brought in failures), sound)
    begins = [int(asked.removeprefix("bytes=").partition("-")[0]) for asked in outcome.asked]
    assert begins == sorted(set(begins)), "each connection goes on behind the one before it"
    if outcome.error is None:
        assert outcome.content == CONTENT[:1000]
    else:
        assert type(outcome.error) is UpstreamUnavailableError
        assert outcome.content[: begins[-1]] == CONTENT[: begins[-1]], "what was brought is right"


def test_a_transfer_that_nobody_wants_any_more_ends_in_the_middle_of_a_body() -> None:
    """The upstream neither ends nor stalls by any policy: it goes on for ever, a little at a time."""

    def trickling(connection: socket) -> None:
        read_head(connection)
        connection.sendall(good(0)[: HEAD + 1])
        with suppress(OSError):
            for at in range(1, 999):
                connection.sendall(CONTENT[at : at + 1])
                select([connection], [], [], 0.02)

    asked = 0

    def goes_on(_: int) -> bool:
        nonlocal asked
        asked += 1
        return asked < 3

    patient = StallPolicy(least_bytes=1, window_seconds=0.03)
    with closing(ConnectionPool(timeout_seconds=5)) as pool, RawServer(trickling) as server:
        request = RangeRequest(SOURCE, "file", ByteRange(0, 1000), SIZE)
        with pytest.raises(CanceledError):
            RangedReader(pool, stall=patient, clock=Clock()).read_into(
                Location(server.url), request, memoryview(bytearray(1000)), goes_on
            )
