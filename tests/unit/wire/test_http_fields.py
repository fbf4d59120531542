"""Byte ranges, both ways (RFC 9110, section 14), and how long an upstream asks us to wait."""

from collections.abc import Iterator
from email.message import Message
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bdn.core.chunk import ByteRange, digest_of
from bdn.core.errors import ForeignRequestError
from bdn.wire import http_fields
from bdn.wire.http_fields import (
    UnsatisfiableRangeError,
    check_local,
    format_content_range,
    format_range,
    parse_content_range,
    parse_push_path,
    parse_range,
    parse_retry_after,
    push_path,
)
from tests.support.network.hypothesis import BRIEFLY


@st.composite
def ranges_and_sizes(draw: st.DrawFn) -> tuple[ByteRange, int]:
    """A range inside a size."""
    size = draw(st.integers(min_value=1, max_value=2**50))
    start = draw(st.integers(min_value=0, max_value=size - 1))
    return ByteRange(start, draw(st.integers(min_value=start + 1, max_value=size))), size


@pytest.mark.parametrize(("header", "expected"), [
    ("bytes=0-9", ByteRange(0, 10)), ("bytes=99-99", ByteRange(99, 100)), ("bytes=10-", ByteRange(10, 100)),
    ("bytes=-10", ByteRange(90, 100)), ("bytes=-1000", ByteRange(0, 100)), ("bytes=50-1000", ByteRange(50, 100)),
    ("bytes=0-" + "9" * 30, ByteRange(0, 100)), ("Bytes=0-9", ByteRange(0, 10)), ("bytes= 0-9 ", ByteRange(0, 10)),
])  # fmt: skip
def test_a_range_is_the_part_that_exists(header: str, expected: ByteRange) -> None:
    assert parse_range(header, 100) == expected


@pytest.mark.parametrize(("header", "size"), [
    ("bytes=100-", 100), ("bytes=100-200", 100), ("bytes=-0", 100), ("bytes=" + "9" * 30 + "-", 100),
    ("bytes=0-", 0), ("bytes=0-0", 0), ("bytes=-5", 0),
])  # fmt: skip
def test_a_range_of_nothing_is_unsatisfiable(header: str, size: int) -> None:
    with pytest.raises(UnsatisfiableRangeError):
        parse_range(header, size)


@pytest.mark.parametrize("header", [
    None, "", "bytes", "bytes=", "bytes=-", "bytes=9-0", "bytes=a-b", "bytes=0-9,20-29", "bytes=0-9,", "bytes=0 - 9",
    "bytes=0--9", "bytes=+0-9", "bytes=1.0-2", "items=0-9", "0-9", "bytes=0-9;", "bytes=\u0660-\u0669",
    "bytes=0-" + "9" * 5000,
])  # fmt: skip
def test_what_is_not_one_range_of_bytes_is_ignored(header: str | None) -> None:
    assert parse_range(header, 100) is None


@BRIEFLY
@given(case=ranges_and_sizes())
@example(case=(ByteRange(0, 1), 1))
def test_a_range_survives_being_written_and_read(case: tuple[ByteRange, int]) -> None:
    asked, size = case
    assert parse_range(format_range(asked), size) == asked
    assert parse_content_range(format_content_range(asked, size)) == (asked, size)


@pytest.mark.parametrize("header", [
    None, "", "bytes 0-9", "bytes 0-9/*", "bytes */100", "bytes 9-0/100", "bytes 0-9/9", "bytes 0-9/0", "bytes=0-9/100",
    "bytes 0-9/100 ", "bytes -9/100", "bytes 0-/100", "items 0-9/100", "bytes 0-9/" + "9" * 5000,
])  # fmt: skip
def test_an_answer_says_which_bytes_of_how_many_or_says_nothing(header: str | None) -> None:
    assert parse_content_range(header) is None


NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110, section 5.6.7


@pytest.fixture(autouse=True, scope="module")
def clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_fields, "time", SimpleNamespace(time=lambda: NOW))
        yield


@pytest.mark.parametrize(("value", "seconds"), [
    ("0", 0.0), ("120", 120.0), (" 7 ", 7.0), ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
    ("Sun, 06 Nov 1994 08:51:37 GMT", 120.0), ("Sun, 06 Nov 1994 08:51:37 -0000", 120.0),
    ("Sun, 06 Nov 1994 09:51:37 +0100", 120.0),
    ("Sunday, 06-Nov-94 08:51:37 GMT", 120.0),  # RFC 850, obsolete and to be understood
    ("Sun, 06 Nov 1994 08:00:00 GMT", 0.0),
    *((value, None) for value in ("", "soon", "-1", "1.5", "\xb2", "1e9", "9" * 400, "later, please")),
    ("Sun, 06 Foo 1994 08:49:37 GMT", None), ("Sun, 99 Nov 99999 1:1:1 GMT", None),
])  # fmt: skip
def test_retry_after_is_a_number_or_a_date_or_says_nothing(value: str, seconds: float | None) -> None:
    headers = Message()
    headers["Retry-After"] = value
    for given_ in (headers, {"retry-after": value}):  # some libraries write names in lower case
        assert parse_retry_after(given_) == seconds


@pytest.mark.parametrize(("value", "seconds"), [
    ('"api";r=0;t=55', 55.0), ('"api"; r=0; t=55', 55.0), ('"api" ; r = 0 ; t = 55', 55.0),
    ('"api";r=499;t=55', None), ('"api";r=10;t=55', None), ('"api";r=5;t=10, "resolve";r=0;t=55', 55.0),
    ('"api";r=0;t=20, "resolve";r=3;t=55', 20.0), ('"api";t=55', None), ("", None),
])  # fmt: skip
def test_the_hub_names_the_seconds_until_its_window_opens_again(value: str, seconds: float | None) -> None:
    assert parse_retry_after({"ratelimit": value}) == seconds
    assert parse_retry_after({"retry-after": "7", "ratelimit": value}) == 7.0


LOCAL = (
    "localhost", "localhost:8460", "LocalHost:8460", "localhost.", "localhost.:8460", "localhost:", "127.0.0.1", "127.0.0.1:80",
    "127.255.0.9:8460", "[::1]", "[::1]:8460", "[0:0:0:0:0:0:0:1]:1", "[::ffff:127.0.0.1]:8460",
    "api.localhost:8000", "page.LOCALHOST.",
)  # fmt: skip
FOREIGN = (
    "", ":8460", "page.example", "page.example:8460", "localhost.page.example", "127.0.0.1.page.example", "page.localhost..",
    "localhost..", "10.0.0.5", "0.0.0.0:8460", "[::]:8460", "[::ffff:10.0.0.5]", "::1", "localhost:8460, page.example",
    "page.example@localhost", "localhost:page.example", "localhost@page.example", "[::1", "[localhost", "127.0.0.1 ",
)  # fmt: skip


def test_a_host_is_local_in_all_of_its_forms_and_none_beside_them_is() -> None:
    check_local(None, None)
    for host in LOCAL:
        check_local(host, None)
    for host in FOREIGN:
        with pytest.raises(ForeignRequestError, match="BDN_AUTH=token"):
            check_local(host, None)


def test_a_page_is_foreign_unless_it_was_read_from_the_very_address_that_it_asks() -> None:
    for host in LOCAL:
        for origin in (f"http://{host}", f"https://{host}", f"HTTP://{host.upper()}"):
            check_local(host, origin)
    for origin in (
        "",
        "null",
        "http://localhost",
        "http://localhost:8461",
        "http://127.0.0.1:8460",
        "file://",
        "localhost:8460",
    ):
        with pytest.raises(ForeignRequestError, match="Origin"):
            check_local("localhost:8460", origin)
        with pytest.raises(ForeignRequestError, match="Origin"):
            check_local(None, origin)


def test_the_path_of_a_pushed_chunk_names_both() -> None:
    push, chunk = f"mir_{'0a' * 12}", digest_of(b"x")
    path = push_path(push, chunk)
    for said in (path, f"{path}?x=y", path.replace("b3:", "b3%3A")):
        assert parse_push_path(said) == (push, chunk)
    for other in (path[1:], path[:-1], f"{path}0", f"/x{path}", f"{path}/", path.upper(), path.replace("0a", "0", 1), f"{path}\n",
                  path.replace("mir_", "psh_"), path.replace("mir_", "../"), path.replace("/chunks/", "/"), f"/chunks/{chunk}"):  # fmt: skip
        assert parse_push_path(other) is None, other
