"""Whatever goes wrong at a hub comes out of the source as one of our errors, after exactly one attempt."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _detect_agent

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    GatedSourceError,
    InvalidSourceError,
    RevisionNotFoundError,
    SecretMalformedError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.sources.huggingface.session import PATIENCE
from tests.contract.opening import Opened, open_hub
from tests.contract.source_contract import listed, seen_before
from tests.doubles.faults import Fault, answer, drop, stall, truncate
from tests.doubles.hub import Hub

REFUSALS = [
    ("hf://org/open", "wrong", AuthRequiredError, "token is not valid"),
    ("hf://org/open@nope", None, RevisionNotFoundError, "'nope'"),
    ("hf://org/open@abc1234", None, RevisionNotFoundError, "'abc1234'"),
    ("hf://org/none", None, AuthRequiredError, "does not exist, or it is private"),
    ("hf://org/none", "owner", SourceNotFoundError, "does not exist, or it is hidden"),
    ("hf://datasets/org/open", "owner", SourceNotFoundError, "does not exist"),
    ("hf://org/private", None, AuthRequiredError, "does not exist, or it is private"),
    ("hf://org/private", "stranger", SourceNotFoundError, "hidden from the account"),
    ("hf://org/gated", None, AuthRequiredError, "it is gated"),
    ("hf://org/gated", "stranger", GatedSourceError, "accept its terms"),
    ("hf://org/gated@nope", "owner", RevisionNotFoundError, "'nope'"),
    ("hf://org/disabled", "owner", SourceNotFoundError, "disabled"),
    ("hf://org/two--dashes", None, InvalidSourceError, "not a valid name of a repository"),
]

PAGE = 2
LARGE = CHUNK_SIZE + 1  # smaller files are located without a question


@pytest.fixture(autouse=True)
def repositories(hub: Hub) -> None:
    for name in ("open", "private", "gated", "disabled"):
        repo = hub.repo(f"org/{name}", private=name == "private", gated=name == "gated")
        repo.commit({f"{number}.txt": b"x" for number in range(5)} | {"model.safetensors": b"weights"})
        repo.disabled = name == "disabled"


def opened(hub: Hub, uri: str = "hf://org/open", token: str | None = None) -> Opened:
    tokens = {"owner": hub.token, "stranger": hub.stranger_token, "wrong": "hf_wrong"}
    return open_hub(hub, uri, token and tokens.get(token, token))


@pytest.mark.parametrize(("uri", "token", "expected", "said"), REFUSALS)
async def test_a_refusal_says_whose_fault_it_is(
    hub: Hub, uri: str, token: str | None, expected: type[BdnError], said: str
) -> None:
    async with opened(hub, uri, token) as source:
        with pytest.raises(expected, match=said) as raised:
            await source.resolve()
    assert not raised.value.transient
    assert "hf_wrong" not in str(raised.value)
    assert uri in str(raised.value)


async def test_a_gated_repository_lists_nothing_to_those_without_access_even_with_a_known_commit(hub: Hub) -> None:
    async with opened(hub, "hf://org/gated", "owner") as source:
        resolution = await source.resolve()
    hub.log.clear()
    async with opened(hub, "hf://org/gated", "stranger") as source:
        with pytest.raises(GatedSourceError):
            await anext(source.list(resolution))
    assert hub.log.count("/tree/") == 0


async def test_access_to_a_gated_repository_is_checked_once(hub: Hub) -> None:
    async with opened(hub, "hf://org/gated", "owner") as source:
        await listed(source)
    assert hub.log.count("/auth-check") == 1


FAILURES = [
    (answer(500), UpstreamUnavailableError, "answered 500"),
    (answer(503), UpstreamUnavailableError, "answered 503"),
    (answer(408), UpstreamUnavailableError, "answered 408"),
    (answer(429), UpstreamRateLimitedError, "429"),
    (answer(403), AuthRequiredError, "answered 403"),
    (answer(410), SourceNotFoundError, "answered 410"),
    (answer(200, body=b"<html>a proxy's page</html>"), UpstreamUnavailableError, "does not look like a hub's"),
    (answer(200, body=b"[{}]"), UpstreamUnavailableError, "does not look like a hub's"),
    (drop(), UpstreamUnavailableError, "did not answer"),
    (truncate(10), UpstreamUnavailableError, "did not answer"),
]


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
@pytest.mark.parametrize(("query", "listed_before"), [("", []), ("cursor=", ["0.txt", "1.txt"])])
async def test_a_failing_request_is_made_once_and_mapped_around_the_iteration(
    hub: Hub, fault: Fault, expected: type[BdnError], said: str, query: str, listed_before: list[str]
) -> None:
    hub.fail(fault, query, times=None)
    assert await seen_before(expected, said, opened(hub)) == listed_before
    assert hub.log.count(query) == 1


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES[:6])
async def test_a_failing_location_is_mapped(hub: Hub, fault: Fault, expected: type[BdnError], said: str) -> None:
    async with opened(hub) as source:
        file = (await listed(source))["model.safetensors"]
        hub.fail(fault, "/resolve/", times=None)
        with pytest.raises(expected, match=said.replace("answered", "")):
            await source.locate(replace(file, size=LARGE))
    assert hub.log.count("/resolve/") == 1


@pytest.mark.parametrize(("headers", "seconds"), [
    ({"Retry-After": "7"}, 7),
    ({"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, 55),
    ({"ratelimit": '"api";r=12;t=55'}, None),
    ({"ratelimit": '"api";r=0;t=5', "Retry-After": "9"}, 9),
    ({}, None),
])  # fmt: skip
async def test_a_rate_limit_tells_how_long_to_wait(hub: Hub, headers: dict[str, str], seconds: float | None) -> None:
    hub.fail(answer(429, headers))
    async with opened(hub) as source:
        with pytest.raises(UpstreamRateLimitedError) as raised:
            await source.resolve()
    assert raised.value.retry_after_seconds == seconds
    assert raised.value.transient


async def test_a_hub_that_goes_silent_in_a_listing_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATIENCE, "read", 0.05)
    hub.fail(stall(at=1), "/tree/")
    async with opened(hub) as source:
        try:
            with pytest.raises(UpstreamUnavailableError, match="ReadTimeout"):
                await asyncio.wait_for(listed(source), 60)
        finally:
            hub.release_stalled()


async def test_a_listing_that_is_cancelled_ends_at_once_and_harms_no_other(hub: Hub) -> None:
    hub.fail(stall(at=1), "cursor=")
    async with opened(hub) as source:
        files = source.list(await source.resolve())
        assert [(await anext(files)).path for _ in range(2)] == ["0.txt", "1.txt"]
        waiting = asyncio.ensure_future(anext(files))
        try:
            await asyncio.to_thread(hub.log.wait_for, "cursor=")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(await listed(source)) == 6
        finally:
            hub.release_stalled()


async def test_sources_can_be_opened_and_listed_at_the_same_time(hub: Hub) -> None:
    async def count_files(uri: str, token: str | None) -> int:
        async with opened(hub, uri, token) as source:
            return len(await listed(source))

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(count_files(uri, "owner"))
            for uri in ("hf://org/open", "hf://org/private", "hf://org/gated")
            for _ in range(5)
        ]
    assert [task.result() for task in tasks] == [6] * 15


async def test_the_telemetry_of_the_sdk_is_answered_here_and_reaches_no_server(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_detect_agent, "_registry", None)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
    async with opened(hub) as source:
        await source.resolve()
    assert hub.log.count() == 1


async def test_a_file_that_vanished_or_changed_its_size_is_a_change_of_the_source(hub: Hub) -> None:
    async with opened(hub) as source:
        file = replace((await listed(source))["model.safetensors"], size=LARGE)
        with pytest.raises(SourceChangedError, match=r"'model\.safetensors'"):
            await source.locate(replace(file, handle="gone.txt"))
        with pytest.raises(SourceChangedError, match=f"listed with {LARGE} bytes, now 7"):
            await source.locate(file)


@pytest.mark.parametrize("value", ["", "\n", "hf_two words", '{"token": "hf_json"}', "hf_ünïcödé", "hf_a\nhf_b"])
async def test_a_malformed_token_is_refused_without_being_shown(hub: Hub, value: str) -> None:
    with pytest.raises(SecretMalformedError) as raised:
        async with opened(hub, token=value or "  "):
            pass
    assert not value.strip() or value not in str(raised.value)


async def test_white_space_around_a_token_is_forgiven(hub: Hub) -> None:
    async with opened(hub, "hf://org/private", f" {hub.token}\n") as source:
        assert (await source.resolve()).revision
