"""Upstreams that are not the same for the whole length of a copy: other content, other addresses, other hosts."""

import hashlib
from collections.abc import Iterator

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.faults import Script, answer, right_after
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.hub import Hub
from tests.doubles.request_log import RequestLog
from tests.support.mirror.scripted_upstreams import (
    CONTENT,
    FILES,
    LARGE,
    OTHER_CONTENT,
    SMALL,
    ScriptedHub,
    ScriptedUpstream,
    check,
)
from tests.support.mirror.service import MirrorUnderTest, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")

CHANGED = {**FILES, LARGE: OTHER_CONTENT}


@pytest.mark.parametrize(
    ("upstream", "skip"), [("s3", 0), ("s3", 1), ("s3", 2), ("hf", 1), ("gs", 1)], indirect=["upstream"]
)
async def test_an_object_that_is_replaced_between_two_ranges_is_never_a_mixture(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, request: pytest.FixtureRequest, skip: int
) -> None:
    upstream.fail(right_after(upstream.change), skip=skip)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    pinned = "[hf" in request.node.name  # a commit stays what it is; an object without versions does not
    await check(hasty, document, FILES if pinned else "SOURCE_CHANGED")
    upstream.script.clear()
    scripted, _ = (await hasty.mirror(upstream.wanted, upstream.neighbour))["sources"]
    assert scripted["status"] == "READY"
    assert await hasty.tree(scripted["manifest"]) == CHANGED


async def test_an_object_that_is_replaced_after_its_listing_is_not_read_under_its_old_name(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, request: pytest.FixtureRequest
) -> None:
    upstream.fail(right_after(upstream.change), file=SMALL)

    document = await hasty.mirror(upstream.wanted, upstream.neighbour)

    # The large file may have been asked for before the small one or after it; there is no third possibility.
    code = (document["sources"][0]["error"] or {}).get("code")
    assert code in (None, "SOURCE_CHANGED")
    await check(hasty, document, code or FILES)
    assert code is None or "[hf" not in request.node.name


async def test_links_that_expire_in_the_middle_of_a_file_are_renewed_and_what_came_before_is_kept(
    hasty_hub: MirrorUnderTest, hub: Hub
) -> None:
    upstream = ScriptedHub(hub)
    upstream.fail(right_after(hub.expire_links), skip=1)

    await check(hasty_hub, await hasty_hub.mirror(upstream.wanted, upstream.neighbour), FILES)

    refused = [read for read in upstream.reads() if read.status == 403]
    assert 1 <= len(refused) <= 2
    assert len(upstream.reads()) == 3 + len(refused)


@pytest.fixture
def elsewhere() -> Iterator[Origin]:
    """Another host, which serves the large file to anybody."""

    def respond(_: Request) -> Answer:
        etag = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
        return Answer(200, {"ETag": f'"{etag}"'}, CONTENT, ranged=True)

    with Origin("elsewhere", respond, log=RequestLog(), script=Script()) as origin:
        yield origin


@pytest.mark.parametrize(
    ("upstream", "status"),
    [("hf", 302), ("gs", 307), *(("s3", status) for status in (301, 302, 303, 307, 308))],
    indirect=["upstream"],
)
async def test_a_redirect_to_another_host_is_followed_without_credentials(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, elsewhere: Origin, status: int
) -> None:
    upstream.fail(answer(status, {"Location": f"{elsewhere.url}/{LARGE}"}), times=None)

    await check(hasty, await hasty.mirror(upstream.wanted, upstream.neighbour), FILES)

    asked = elsewhere.log.find()
    assert len(asked) == 3
    assert [request for request in asked if "authorization" in request.headers] == []
    assert {request.headers["range"] for request in asked} >= {f"bytes=0-{CHUNK_SIZE - 1}"}


async def test_a_token_goes_to_its_own_host_and_not_where_that_one_sends_us(
    upstreams: None, hasty_hub: MirrorUnderTest, hub: Hub, elsewhere: Origin
) -> None:
    hub.repo("org/private", private=True).commit({"config.json": CONTENT[:1000]})
    elsewhere.responder = lambda _: Answer(200, {}, CONTENT[:1000], ranged=True)
    hub.fail(answer(302, {"Location": f"{elsewhere.url}/config.json"}), "/resolve/.*config.json", times=None)

    document = await hasty_hub.ready(source("hf://org/private", **with_secret("hub-token")))

    assert await hasty_hub.tree(document["sources"][0]["manifest"]) == {"config.json": CONTENT[:1000]}
    assert {request.headers.get("authorization") for request in hub.log.find("/resolve/")} == {f"Bearer {hub.token}"}
    assert len(elsewhere.log.find()) == 1
    assert "authorization" not in elsewhere.log.find()[0].headers


@pytest.mark.parametrize("upstream", ["s3"], indirect=True)
async def test_a_redirect_to_wrong_bytes_is_not_believed(
    hasty: MirrorUnderTest, upstream: ScriptedUpstream, elsewhere: Origin
) -> None:
    etag = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    elsewhere.responder = lambda _: Answer(200, {"ETag": f'"{etag}"'}, OTHER_CONTENT, ranged=True)
    upstream.fail(answer(302, {"Location": f"{elsewhere.url}/{LARGE}"}), times=None)

    await check(hasty, await hasty.mirror(upstream.wanted, upstream.neighbour), "CHECKSUM_MISMATCH")

    upstream.script.clear()
    await check(hasty, await hasty.mirror(upstream.wanted, upstream.neighbour), FILES)
    assert len(upstream.reads()) == 3 * 3, "twice wrong and once right: nothing of the wrong file is kept"
