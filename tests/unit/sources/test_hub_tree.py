"""The session of huggingface_hub behind the egress guard, and for others in the same process; pages of a hub's tree that are none."""

import json
from collections.abc import Iterator

import httpx2
import pytest
from huggingface_hub import close_session, get_session

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import EgressRefusedError
from bdn.sources.huggingface import session as hub_session
from bdn.sources.huggingface.session import GuardedTransport, HubUnreachableError, one_attempt
from bdn.sources.huggingface.tree import read_page
from tests.doubles.faults import Script
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.request_log import RequestLog
from tests.support.network.egress_streets import Names

ALLOWED = EgressPolicy.parse("127.0.0.1 127.0.0.3")


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    close_session()
    yield
    close_session()


@pytest.fixture
def server() -> Iterator[Origin]:
    with Origin("hub", lambda _: Answer(200, {}, b"yes"), log=RequestLog(), script=Script()) as origin:
        yield origin


def named(server: Origin) -> str:
    return server.url.replace("127.0.0.1", "hub.example")


def test_an_idle_connection_is_not_used_under_a_policy_that_would_not_have_made_it(
    server: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch).say("hub.example", ["127.0.0.1"])
    with one_attempt(ALLOWED):
        assert get_session().get(named(server)).text == "yes"
    with one_attempt(PUBLIC_INTERNET), pytest.raises(EgressRefusedError):
        get_session().get(named(server))
    assert server.log.count() == 1


def test_connections_are_kept_under_one_policy(server: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.say("hub.example", ["127.0.0.1"])
    for _ in range(3):
        with one_attempt(EgressPolicy.parse("127.0.0.1")):
            assert get_session().get(named(server)).text == "yes"
    assert names.asked == ["hub.example"]


def test_calls_that_are_not_ours_go_where_they_will(server: Origin) -> None:
    with one_attempt(PUBLIC_INTERNET):
        get_session()
    assert get_session().get(server.url).text == "yes"


def test_an_address_that_does_not_answer_is_followed_by_the_next_one(
    server: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)
    names.say("hub.example", ["127.0.0.3", "127.0.0.1"])
    with one_attempt(ALLOWED):
        assert get_session().get(named(server)).text == "yes"


def test_a_name_that_does_not_resolve_is_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    names.say("empty.example", [])
    for name in ("nowhere.example", "empty.example"):
        with one_attempt(PUBLIC_INTERNET), pytest.raises(HubUnreachableError, match="ConnectError"):
            get_session().get(f"http://{name}")


def test_a_version_of_httpx2_that_connects_in_another_way_does_not_go_out_unguarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(hub_session._Session, "_init_transport")  # as if httpx2 did not call it any more
    with one_attempt(PUBLIC_INTERNET), pytest.raises(TypeError, match="egress guard"):
        get_session()

    def other_init(self: httpx2.HTTPTransport, **_: object) -> None:
        """A transport that keeps its connections under another name."""

    monkeypatch.setattr(httpx2.HTTPTransport, "__init__", other_init)
    with pytest.raises(AttributeError, match="_pool"):
        GuardedTransport(PUBLIC_INTERNET, httpx2.create_ssl_context(), httpx2.Limits())


FILE = {"type": "file", "path": "a", "size": 3, "oid": "d" * 40}


class Pages:
    """Answers every request with ``entries``, and with ``link`` as where the next page is."""

    def __init__(self) -> None:
        self.entries: object = [FILE]
        self.link = ""

    def respond(self, _: Request) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Link": f'<{self.link}>; rel="next"'} if self.link else {})
        return Answer(200, headers, json.dumps(self.entries).encode())


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def url(pages: Pages) -> Iterator[str]:
    with Origin("pages", pages.respond, log=RequestLog(), script=Script()) as origin:
        yield f"{origin.url}/api/models/o/m/tree/main"


def test_a_page_tells_its_files_and_where_the_next_one_is(pages: Pages, url: str) -> None:
    pages.link = f"{url}?cursor=2"
    page = read_page(url, {}, url.partition("/api")[0])
    assert ([file.path for file in page.files], page.following) == (["a"], pages.link)


def test_a_page_that_comes_after_itself_is_refused(pages: Pages, url: str) -> None:
    pages.link = url
    with pytest.raises(ValueError, match="names itself as the next page"):
        read_page(url, {}, url.partition("/api")[0])


@pytest.mark.parametrize("change", [
    {"path": 1}, {"size": -1}, {"size": 1.0}, {"size": True}, {"size": "3"}, {"oid": "x"}, {"oid": None},
    {"lfs": {"oid": 1, "size": 3, "pointerSize": 1}}, {"type": "directory", "path": 5},
])  # fmt: skip
def test_an_entry_that_cannot_be_a_file_or_a_folder_is_refused(
    pages: Pages, url: str, change: dict[str, object]
) -> None:
    pages.entries = [FILE | change]
    with pytest.raises((TypeError, ValueError)):
        read_page(url, {}, url.partition("/api")[0])
