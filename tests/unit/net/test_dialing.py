"""Dialling behind the egress guard: which of a host's addresses is called, and how it fails."""

import socket
from contextlib import closing

import pytest

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.net.http1.pool import dial
from tests.support.network.egress_streets import Doorbell, Names, note_attempts

TWO = EgressPolicy.parse("127.0.0.1 127.0.0.3")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_attempts(monkeypatch)


def test_an_address_that_does_not_answer_is_followed_by_the_next_one(names: Names, attempts: list[str]) -> None:
    with Doorbell("127.0.0.1") as bell:
        names.say("hub.example", ["127.0.0.3", "127.0.0.1"])
        with closing(dial("hub.example", bell.port, 10, TWO)) as connection:
            assert connection.getpeername() == ("127.0.0.1", bell.port)
            assert connection.gettimeout() == 10
        assert bell.rang
    assert attempts == ["127.0.0.3", "127.0.0.1"]


def test_the_last_failure_is_told_when_no_address_answers(names: Names) -> None:
    with Doorbell("127.0.0.1") as bell:
        port = bell.port
    names.say("hub.example", ["127.0.0.3", "127.0.0.1"])
    with pytest.raises(ConnectionRefusedError):
        dial("hub.example", port, 10, TWO)


def test_a_name_that_does_not_resolve_is_a_failure_of_the_network(names: Names) -> None:
    with pytest.raises(socket.gaierror):
        dial("nowhere.example", 1, 10, PUBLIC_INTERNET)
    names.say("empty.example", [])
    with pytest.raises(OSError, match="no address"):
        dial("empty.example", 1, 10, PUBLIC_INTERNET)


def test_what_is_resolved_is_what_was_judged(names: Names) -> None:
    """The resolver would read the text again, and by rules of its own."""
    with pytest.raises(socket.gaierror):
        dial("B\u00fccher.Example.", 1, 10, PUBLIC_INTERNET)
    assert names.asked == ["xn--bcher-kva.example"]


def test_an_ipv6_address_is_called_by_its_own_family() -> None:
    with Doorbell("::1") as bell, closing(dial("[::1]", bell.port, 10, EgressPolicy.parse("::1"))) as connection:
        assert connection.family == socket.AF_INET6
        assert bell.rang
