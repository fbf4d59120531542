"""The operator's page without a browser: who gets in, what each may see, and what is refused."""

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

import httpx2
import pytest

from bdn.mirror.access.sessions import SESSION_SECONDS
from tests.fakes.clock import Clock
from tests.support.mirror.page_world import (
    GB,
    MODELS,
    OPERATOR,
    TB,
    PageWorld,
    fill,
    held,
    manifest_of,
    page_world,
    use,
)

ROOT: Final = Path(__file__).parents[2]
OURS: Final = {"Sec-Fetch-Site": "same-origin"}
SOURCE: Final = MODELS[0][0]
# Of the files as they are in the packages htmx.org 4.0.1: dist/htmx.min.js and dist/ext/hx-sse.min.js.
VENDORED: Final = {
    "htmx.min.js": "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
    "hx-sse.min.js": "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
    "htmx.LICENSE": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PageWorld]:
    async with page_world(tmp_path / "mirror") as world:
        yield world


@asynccontextmanager
async def client_of(world: PageWorld, token: str | None = None, **form: str) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser without a page; with a token it is logged in."""
    async with httpx2.AsyncClient(base_url=world.url, trust_env=False) as client:
        if token is not None:
            answer = await client.post("/ui/login", data={"token": token, **form}, headers=OURS)
            assert answer.status_code == 303, answer.text
        yield client


@pytest.fixture
async def viewer(world: PageWorld) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(world, OPERATOR) as client:
        yield client


async def test_log_in__sets_a_cookie_that_scripts_and_other_sites_do_not_get(world: PageWorld) -> None:
    async with client_of(world) as client:
        asked = await client.get("/ui/cluster?page=2")
        assert (asked.status_code, asked.headers["location"]) == (303, "/ui/login?next=%2Fui%2Fcluster%3Fpage%3D2")
        form = {"token": OPERATOR, "next": "/ui/cluster?page=2"}
        answer = await client.post("/ui/login", data=form, headers=OURS)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/cluster?page=2")
        name, *attributes = answer.headers["set-cookie"].split("; ")
        assert {one.lower() for one in attributes} == {
            "httponly",
            "samesite=strict",
            "path=/ui",
            f"max-age={SESSION_SECONDS}",
        }
        behind_tls = await client.post("/ui/login", data=form, headers=OURS | {"X-Forwarded-Proto": "https"})
        assert "secure" in behind_tls.headers["set-cookie"].lower()
    session_id = name.partition("=")[2]
    rows = world.mirror.rows("page_sessions")["page_sessions"]
    assert session_id not in str(rows)
    assert OPERATOR not in str(rows)
    assert sha256(session_id.encode()).hexdigest() in str(rows)


@pytest.mark.parametrize("destination", ["https://evil.example/ui/", "//evil.example", "/uix", "/mirror", "/ui/\u202e"])
async def test_log_in__leads_nowhere_else(world: PageWorld, destination: str) -> None:
    async with client_of(world) as client:
        answer = await client.post("/ui/login", data={"token": OPERATOR, "next": destination}, headers=OURS)
        assert answer.headers["location"] == "/ui"


async def test_log_in__refuses_wrong_tokens_and_tokens_of_agents(world: PageWorld) -> None:
    agent = await world.add_token("agent", "agent")
    async with client_of(world) as client:
        for token, status in (("", 401), ("let me in", 401), ("bdn_" + "x" * 43, 401), (agent, 403)):
            answer = await client.post("/ui/login", data={"token": token}, headers=OURS)
            assert answer.status_code == status, token
            assert "set-cookie" not in answer.headers
            assert 'role="alert"' in answer.text
            assert not token or token not in answer.text
        assert (await client.get("/ui")).status_code == 303
        assert (await client.get("/ui/live/now")).status_code == 401
    assert world.mirror.count("page_sessions") == 0


async def test_session__ends_by_log_out_with_its_token_and_after_twelve_hours(tmp_path: Path) -> None:
    clock = Clock()
    async with page_world(tmp_path / "mirror", clock=clock) as world:
        token = await world.add_token("viewer", "controller")
        async with (
            client_of(world, token) as leaver,
            client_of(world, token) as revoked,
            client_of(world, OPERATOR) as old,
        ):
            cookies = dict(leaver.cookies)
            assert [(await one.get("/ui")).status_code for one in (leaver, revoked, old)] == [200, 200, 200]
            assert (await leaver.post("/ui/logout", data={"x": ""}, headers=OURS)).headers["location"] == "/ui/login"
            assert not leaver.cookies
            leaver.cookies.update(cookies)  # a copy of the cookie is worth nothing either
            assert [(await one.get("/ui")).status_code for one in (leaver, revoked, old)] == [303, 200, 200]
            [listed] = (await world.mirror.get("/tokens"))["items"]
            await world.mirror.http.delete(f"/tokens/{listed['id']}")
            assert [(await one.get("/ui")).status_code for one in (revoked, old)] == [303, 200]
            clock.advance(SESSION_SECONDS - 1)
            assert (await old.get("/ui")).status_code == 200
            clock.advance(2)
            assert (await old.get("/ui")).status_code == 303
            async with client_of(world, OPERATOR):
                assert world.mirror.count("page_sessions") == 1  # expired ones are deleted


async def test_session__of_the_operators_token_ends_when_the_setting_changes(tmp_path: Path) -> None:
    async with page_world(tmp_path / "mirror") as world, client_of(world, OPERATOR) as client:
        cookies = dict(client.cookies)
    for token, status in ((OPERATOR, 200), ("another", 303)):
        async with page_world(tmp_path / "mirror", token=token) as world, client_of(world) as client:
            client.cookies.update(cookies)
            assert (await client.get("/ui")).status_code == status


async def test_a_hundred_log_ins_of_a_token_are_kept__the_oldest_ends(world: PageWorld) -> None:
    async with client_of(world, OPERATOR) as first, client_of(world, OPERATOR) as second:
        for _ in range(99):
            async with client_of(world, OPERATOR):
                pass
        assert world.mirror.count("page_sessions") == 100
        assert [(await one.get("/ui")).status_code for one in (first, second)] == [303, 200]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "{own}"},
        {},
    ],
)
async def test_forged_post__changes_nothing(
    world: PageWorld, viewer: httpx2.AsyncClient, headers: dict[str, str]
) -> None:
    sent = {name: value.format(own=world.url) for name, value in headers.items()}
    for path, form in (("/ui/logout", {}), ("/ui/login", {"token": OPERATOR})):
        answer = await viewer.post(path, data=form, headers=sent)
        assert answer.status_code == 403
        assert "was not sent from this page" in answer.text
    assert (await viewer.get("/ui")).status_code == 200
    assert world.mirror.count("page_sessions") == 1


async def test_post_of_an_equal_origin__is_accepted_without_sec_fetch_site(
    world: PageWorld, viewer: httpx2.AsyncClient
) -> None:
    answer = await viewer.post("/ui/logout", data={"x": ""}, headers={"Origin": world.url})
    assert answer.status_code == 303
    assert world.mirror.count("page_sessions") == 0


async def test_every_answer__keeps_the_browser_to_this_page(world: PageWorld, viewer: httpx2.AsyncClient) -> None:
    for path in (
        "/ui",
        "/ui/login",
        "/ui/none",
        "/ui/node?cluster=c&node=n",
        "/ui/search?q=" + "x" * 5000,
        "/ui/assets/none",
    ):
        answer = await viewer.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';"), path
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script>|javascript:", answer.text), path


async def test_errors__are_pages_that_say_what_to_do(world: PageWorld, viewer: httpx2.AsyncClient) -> None:
    for path, status, words in (
        ("/ui/none", 404, "search box"),
        ("/ui/node?cluster=c&node=n", 404, "search box"),
        ("/ui/node", 404, "search box"),
        ("/ui/cluster?page=none", 422, "page is a number"),
        ("/ui/cluster?cluster=none", 404, "search box"),
        ("/ui/node?after=b3:zz&cluster=c&node=n", 404, "search box"),
        ("/ui/search?q=" + "x" * 5000, 422, "Go back"),
        ("/ui/cluster?cluster=" + "x" * 5000, 422, "correct the address"),
        ("/ui/cluster?cluster=%00", 422, "correct the address"),
        ("/ui/assets/..%2fpage.css", 404, "search box"),
    ):
        answer = await viewer.get(path)
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert words in answer.text, (path, answer.text)
    kinds: list[tuple[bytes, str, int]] = [
        (b'{"token": 1}', "application/json", 422),
        (b"token=" + b"x" * 70_000, "application/x-www-form-urlencoded", 413),
        (b"&".join([b"a=1"] * 200), "application/x-www-form-urlencoded", 422),
        (b"token=%ff", "application/x-www-form-urlencoded", 422),
        (b"token=%00", "application/x-www-form-urlencoded", 422),
        (b"\xff", "application/x-www-form-urlencoded", 422),
    ]
    for body, kind, status in kinds:
        answer = await viewer.post("/ui/login", content=body, headers=OURS | {"Content-Type": kind})
        assert answer.status_code == status, (body[:20], answer.text)
        assert "<h1>" in answer.text
    assert (await viewer.post("/ui/cluster", data={}, headers=OURS)).status_code == 405


async def test_tokens_see_what_the_api_shows_them(world: PageWorld) -> None:
    await fill(world, 8)
    await world.add_mirror("hf://secret/of-another@main", "READY", organisation="rival")
    job = "rival-job"
    holdings = [held("hf://secret/of-another@main", GB, jobs=[job]), held(SOURCE, GB, jobs=[job])]
    await world.agent("h200-001", holdings=holdings).beat()
    await world.mirror.http.post("/teams", json={"name": "research"})
    await world.add_mirror("hf://of/the-team@main", "SYNCING", team="research")
    node = "/ui/node?cluster=iad-h200&node=h200-001"
    async with (
        client_of(world, OPERATOR) as operator,
        client_of(world, OPERATOR, organisation="rival") as for_rival,
        client_of(world, await world.add_token("controller", "controller")) as controller,
        client_of(world, await world.add_token("team", "controller", team="research")) as team,
    ):
        seen = {
            name: (await one.get(node)).text
            for name, one in (("operator", operator), ("rival", for_rival), ("controller", controller))
        }
        assert [SOURCE in seen[name] for name in seen] == [True, False, True]
        assert ["secret/of-another" in seen[name] for name in seen] == [False, True, False]
        assert [job in seen[name] for name in seen] == [True, True, False]
        for path in (node, "/ui/cluster", "/ui/live/cluster"):
            refused = await team.get(path)
            assert refused.status_code == 403
            assert "limited to team" in refused.text
        now = (await team.get("/ui")).text
        assert "h200" not in now
        assert "<dt>Mirrors at work</dt><dd>1</dd>" in now
        assert "<li>Node" not in (await team.get("/ui/search?q=h200")).text
        assert "rival" in seen["rival"]


async def test_manifests_and_stages_of_one_node(world: PageWorld) -> None:
    """What the view *Node* shows, by the API."""
    await fill(world, 8)
    at = {"cluster": "iad-h200", "node": "h200-005"}
    held_there = (await world.mirror.get("/manifests", **at))["items"]
    assert [item["manifest"] for item in held_there] == [f"b3:{manifest_of(SOURCE)}"]
    assert [list(item["nodes"]) for item in held_there] == [["iad-h200/h200-005"]]
    stages = (await world.mirror.get("/stages", **at))["items"]
    assert [(stage["node"], stage["job"]) for stage in stages] == [("h200-005", "llama-sft/job-1805")]
    assert (await world.mirror.get("/stages", cluster="iad-h200", node="none"))["items"] == []
    for path in ("/manifests", "/stages"):
        assert (await world.mirror.http.get(path, params={"node": "h200-005"})).status_code == 422
    assert (await world.mirror.http.get("/stages", params={"job": "j", **at})).status_code == 422


async def test_search__leads_to_nodes_mirrors_sources_digests_paths_and_jobs(
    world: PageWorld, viewer: httpx2.AsyncClient
) -> None:
    await fill(world, 8)
    mirror = await world.add_mirror("hf://org/one@main", "READY")
    for text, place in (
        ("h200-005", "/ui/node?cluster=iad-h200&node=h200-005"),
        (mirror, f"/ui/mirror?id={mirror}"),
        ("hf://org/one@main", "/ui/model?of=hf%3A%2F%2Forg%2Fone%40main"),
        (manifest_of(SOURCE), f"/ui/model?of=b3%3A{manifest_of(SOURCE)}"),
        ("/models/m/config.json", "/ui/model?of=%2Fmodels%2Fm%2Fconfig.json"),
        ("fineweb", "/ui/model?of=s3%3A%2F%2Fresearch-datasets%2Ffineweb-edu%2F2026-10"),
    ):
        answer = await viewer.get("/ui/search", params={"q": text})
        assert (answer.status_code, answer.headers.get("location")) == (303, place), text
    many = await viewer.get("/ui/search", params={"q": "h200"})
    assert (many.status_code, many.text.count("<li>Node")) == (200, 6)
    for text in ("nothing", f"mir_{'0' * 24}", ""):
        answer = await viewer.get("/ui/search", params={"q": text})
        assert answer.status_code == 200, text


async def test_page_about_nothing__says_what_to_do_next(world: PageWorld, viewer: httpx2.AsyncClient) -> None:
    assert "bdn mirror hf://org/model" in (await viewer.get("/ui")).text
    assert "bdn-node-agent" in (await viewer.get("/ui/cluster")).text


async def test_node_without_content__says_how_to_put_some_there(world: PageWorld, viewer: httpx2.AsyncClient) -> None:
    await world.agent("n").beat()
    assert "bdn-admin prefetch" in (await viewer.get("/ui/node?cluster=iad-h200&node=n")).text


async def test_without_tokens__the_page_needs_no_log_in_and_answers_this_machine_alone(tmp_path: Path) -> None:
    async with page_world(tmp_path / "mirror", auth="off") as world, client_of(world) as client:
        shown = await client.get("/ui")
        assert shown.status_code == 200
        assert "Log out" not in shown.text
        assert (await client.get("/ui/login")).headers["location"] == "/ui"
        assert (await client.get("/ui", headers={"Host": "evil.example"})).status_code == 403


async def test_assets__are_the_vendored_files_with_their_licence_and_cached_by_their_digest(
    viewer: httpx2.AsyncClient,
) -> None:
    folder = ROOT / "bdn/mirror/page/assets"
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED
    page = (await viewer.get("/ui")).text
    for name, kind in (
        ("htmx.min.js", "text/javascript"),
        ("hx-sse.min.js", "text/javascript"),
        ("page.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        address = page.split(f'"/ui/assets/{name}')[1].split('"')[0]
        answer = await viewer.get(f"/ui/assets/{name}{address}")
        assert answer.content == (folder / name).read_bytes()
        assert answer.headers["content-type"].startswith(kind)
        assert "immutable" in answer.headers["cache-control"]


async def test_stream__sends_what_changed_and_not_what_the_viewer_has(
    world: PageWorld, viewer: httpx2.AsyncClient
) -> None:
    await fill(world, 8)
    page = (await viewer.get("/ui/cluster")).text
    live = page.split('hx-sse:connect="')[1].split('"')[0].replace("&amp;", "&")
    async with asyncio.timeout(60):
        async with viewer.stream("GET", live) as stream:
            events = stream.aiter_text()
            first = await anext(events)
            assert 'id="live"' in first
            assert 'id="map"' not in first
            await world.agent("h200-006", tiers={"node": use(TB, 0.995)}).beat()
            seen = ""
            while "100 %" not in seen:
                seen = await anext(events)
            assert seen.count("<svg><a ") == 1  # one cell of the map
            assert 'id="map"' not in seen
        async with viewer.stream("GET", "/ui/live/cluster") as stream:
            assert 'id="map"' in await anext(stream.aiter_text())  # all of it, for a viewer who says nothing


async def test_fifty_viewers__cost_one_read_a_second_and_none_when_the_last_has_gone(
    world: PageWorld, viewer: httpx2.AsyncClient
) -> None:
    await fill(world, 8)
    reads = 0
    membership = world.mirror.service.api.state.provided
    counted = next(one for kind, one in membership.items() if kind.__name__ == "Membership")
    read = counted.agents

    async def agents(*arguments: object) -> object:
        nonlocal reads
        reads += 1
        return await read(*arguments)

    counted.agents = agents
    ticks, began = 0, time.monotonic()

    async def look() -> None:
        nonlocal ticks
        async with viewer.stream("GET", "/ui/live/cluster") as stream:
            async for _ in stream.aiter_text():
                ticks += 1
                if ticks >= 200:
                    return

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(look())
    assert ticks >= 200
    assert 1 <= reads <= 3 + time.monotonic() - began  # a second each, and one that is under way
    async with asyncio.timeout(60):
        while reads:  # until the server has noticed that they are gone
            reads = 0
            await asyncio.sleep(2.5)  # more than two intervals of a live view
