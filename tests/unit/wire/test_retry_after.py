"""How long an upstream asks us to wait, in all the ways in which it may say so."""

from __future__ import annotations

from email.message import Message
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.wire import http_fields
from bdn.wire.http_fields import parse_retry_after
from tests.support.network.hypothesis import BRIEFLY

NOW = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110, section 5.6.7


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fields, "time", SimpleNamespace(time=lambda: NOW))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:51:37 GMT", 120.0),
        ("Sun, 06 Nov 1994 08:51:37 -0000", 120.0),
        ("Sun, 06 Nov 1994 09:51:37 +0100", 120.0),
        ("Sunday, 06-Nov-94 08:51:37 GMT", 120.0),  # RFC 850, obsolete and to be understood
        ("Sun, 06 Nov 1994 08:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(value: str, seconds: float) -> None:
    assert parse_retry_after({"Retry-After": value}) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "soon",
        "-1",
        "1.5",
        "\xb2",
        "1e9",
        "9" * 400,
        "Sun, 06 Foo 1994 08:49:37 GMT",
        "later, please",
        "Sun, 99 Nov 99999 1:1:1 GMT",
    ],
)
def test_what_is_neither_says_nothing(value: str) -> None:
    assert parse_retry_after({"Retry-After": value}) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ('"api";r=0;t=55', 55.0),
        ('"api"; r=0; t=55', 55.0),
        ('"api" ; r = 0 ; t = 55', 55.0),
        ('"api";r=499;t=55', None),
        ('"api";r=10;t=55', None),
        ('"api";r=5;t=10, "resolve";r=0;t=55', 55.0),
        ('"api";r=0;t=20, "resolve";r=3;t=55', 20.0),
        ('"api";t=55', None),
        ("", None),
    ],
)
def test_the_hub_names_the_seconds_until_its_window_opens_again(value: str, seconds: float | None) -> None:
    assert parse_retry_after({"ratelimit": value}) == seconds


def test_retry_after_goes_before_the_hubs_header() -> None:
    assert parse_retry_after({"Retry-After": "7", "ratelimit": '"api";r=0;t=55'}) == 7.0


def test_dictionaries_with_names_in_lower_case_are_understood() -> None:
    assert parse_retry_after({"retry-after": "7"}) == 7.0
    assert (
        parse_retry_after({"ratelimit": '"api";r=0;t=55'}) == parse_retry_after({"RateLimit": '"api";r=0;t=55'}) == 55
    )


def test_no_header_says_nothing() -> None:
    assert parse_retry_after({}) is None


def test_headers_of_http_client_are_found_in_any_spelling() -> None:
    headers = Message()
    headers["retry-after"] = "7"
    assert parse_retry_after(headers) == 7.0


@BRIEFLY
@given(text=st.text(st.characters(max_codepoint=255), max_size=40), name=st.sampled_from(["Retry-After", "ratelimit"]))
def test_no_header_is_too_strange(text: str, name: str) -> None:
    seconds = parse_retry_after({name: text})
    assert seconds is None or 0 <= seconds < float("inf")
