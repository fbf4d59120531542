"""The commit that a revision names now, asked without the hub's client: what that client says, or nothing."""

from dataclasses import replace

import pytest

from bdn.core.errors import BdnError, InvalidRequestError
from bdn.core.source.uri import HuggingFaceUri, parse_source
from bdn.sources.huggingface.revision import commit_now
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from tests.doubles.faults import Fault, answer, drop, rate_limited
from tests.doubles.hub import Hub
from tests.support.network.egress import LOOPBACK

PAGE = 1000


@pytest.fixture
def settings(hub: Hub) -> UpstreamSettings:
    return UpstreamSettings(egress=LOOPBACK, hf_endpoint=hub.url)


def uri_of(text: str) -> HuggingFaceUri:
    uri = parse_source(text)
    assert isinstance(uri, HuggingFaceUri)
    return uri


async def by_the_client(uri: HuggingFaceUri, settings: UpstreamSettings) -> str | None:
    try:
        async with open_source(uri, SourceContext("default", settings, ambient_credentials=True)) as source:
            return (await source.resolve()).revision
    except BdnError:
        return None


@pytest.mark.parametrize("uri", [
    "hf://org/model", "hf://org/model@main", "hf://org/model@absent", "hf://org/absent", "hf://datasets/org/data",
    "hf://spaces/org/space", "hf://org/private", "hf://org/gated", "hf://org/model@refs/pr/1",
])  # fmt: skip
@pytest.mark.parametrize("caller", ["anonymous", "owner", "stranger", "wrong"])
async def test_commit_now__of_each_kind_of_repository__is_what_the_hub_s_client_says(
    hub: Hub, settings: UpstreamSettings, uri: str, caller: str
) -> None:
    hub.repo("org/model").commit({"a": b"1"})
    hub.repo("org/data", kind="dataset").commit({"a": b"2"})
    hub.repo("org/space", kind="space").commit({"a": b"3"})
    hub.repo("org/private", private=True).commit({"a": b"4"})
    hub.repo("org/gated", gated=True).commit({"a": b"5"})
    token = {"owner": hub.token, "stranger": hub.stranger_token, "wrong": "hf_wrong"}.get(caller)
    given = replace(settings, hf_token=token)

    assert commit_now(uri_of(uri), given) == await by_the_client(uri_of(uri), given)


@pytest.mark.parametrize("fault", [
    drop(), answer(503), answer(302, {"Location": "http://127.0.0.1:1/x"}), rate_limited(1),
    answer(200, body=b"<html>"), answer(200, body=b"[" * 100_000), answer(200, body=b'{"sha": "main", "gated": false}'), answer(200, body=b"[]"),
    answer(200, body=b'{"sha": null}'), answer(200, body=b" " * 2_000_000),
])  # fmt: skip
def test_commit_now__with_an_answer_that_is_not_a_hub_s__is_unknown(
    hub: Hub, settings: UpstreamSettings, fault: Fault
) -> None:
    hub.repo("org/model").commit({"a": b"1"})
    hub.fail(fault, times=None)
    assert commit_now(uri_of("hf://org/model"), settings) is None


def test_commit_now__at_an_address_that_may_not_be_contacted__asks_nothing(hub: Hub) -> None:
    assert commit_now(uri_of("hf://org/model"), UpstreamSettings(hf_endpoint=hub.url)) is None
    assert hub.log.count() == 0


def test_commit_now__with_a_wrong_variable__is_refused_by_its_name(
    settings: UpstreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://h:1")
    with pytest.raises(InvalidRequestError, match=r"^ALL_PROXY: "):
        commit_now(uri_of("hf://org/model"), settings)
