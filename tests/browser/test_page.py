"""The operator's page in a real browser: log-in, live views, hostile names, and what a person needs who cannot see or click."""

from typing import Final
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, expect

from tests.support.mirror.page_world import HOSTILE, OPERATOR, TB, PageWorld, fill, held, use
from tests.support.services.browser import AXE, Tab, tab

pytestmark = [pytest.mark.embedded("the page reads through the services, whatever is behind them")]
NODE: Final = "/ui/node?cluster=iad-h200&node=h200-005"
VIEWS: Final = {
    "now": "/ui",
    "cluster": "/ui/cluster",
    "node": NODE,
    "search": "/ui/search?q=h200",
    "login": "/ui/login",
}


async def test_log_in__with_the_keyboard_alone__leads_to_the_view_that_was_asked_for_and_log_out_ends_it(
    opened: Tab, world: PageWorld
) -> None:
    await fill(world, 8)
    page = opened.page
    await opened.go("/ui/cluster")
    await page.keyboard.type(OPERATOR)  # the field has the focus
    await page.keyboard.press("Enter")

    await expect(page.get_by_role("heading", name="Cluster", exact=True)).to_be_visible()
    assert page.url == f"{world.url}/ui/cluster"
    await page.get_by_role("link", name="h200-005: alive").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Node h200-005")).to_be_visible()
    await page.get_by_role("searchbox").focus()
    await page.keyboard.type("h200-006")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Node h200-006")).to_be_visible()
    await page.get_by_role("button", name="Log out").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    await opened.go("/ui/cluster")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()


async def test_wrong_token__is_said_beside_the_form(opened: Tab) -> None:
    await opened.go("/ui")
    await opened.page.get_by_label("Token").fill("bdn_" + "x" * 43)
    await opened.page.get_by_role("button", name="Log in").click()

    await expect(opened.page.get_by_role("alert")).to_contain_text("unknown to this mirror")
    await expect(opened.page.get_by_label("Token")).to_be_visible()
    opened.complaints.clear()  # Chromium names the status 401 of the answer


async def test_live__changes_reach_every_view_without_a_reload_and_keep_the_focus(
    opened: Tab, world: PageWorld
) -> None:
    await fill(world, 8)
    await opened.log_in(OPERATOR, "/ui/cluster")
    page = opened.page
    await page.evaluate("window.stayed = true")
    link = page.get_by_role("row", name="h200-006").get_by_role("link")
    await link.focus()

    await world.agent("h200-006", tiers={"node": use(TB, 0.995)}).beat()
    await expect(page.get_by_role("row", name="h200-006 alive 100 %")).to_be_visible()
    await expect(link).to_be_focused()
    await expect(page.get_by_role("link", name="h200-006: alive, 100 % used")).to_have_count(1)
    await world.agent("h200-new", tiers={"node": use(TB, 0.5)}).beat()
    await expect(page.get_by_role("link", name="h200-new: alive, 50 % used")).to_have_count(1)
    await expect(page.get_by_role("row", name="h200-new alive 50 %")).to_be_visible()

    assert await page.evaluate("window.stayed")
    assert await page.evaluate(
        "[...document.querySelectorAll('#map *')].every(one => one.namespaceURI.endsWith('svg'))"
    )
    await opened.go("/ui")
    await world.agent("h200-new", tiers={"node": use(TB, 0.5, pressed=TB // 4)}).beat()
    await expect(page.get_by_role("listitem").filter(has_text="pressed").filter(has_text="h200-new")).to_be_visible()
    await opened.go("/ui/node?cluster=iad-h200&node=h200-new")
    await world.agent("h200-new", tiers={"node": use(TB, 0.25)}).beat()
    await expect(page.get_by_role("img", name="25 % used")).to_have_count(1)


async def test_without_javascript__the_views_are_plain_pages(browser: Browser, world: PageWorld) -> None:
    await fill(world, 8)
    async with tab(browser, world.url, java_script_enabled=False) as opened:
        await opened.log_in(OPERATOR)
        page = opened.page
        await expect(page.get_by_text("Pressed").or_(page.get_by_text("Unsynced checkpoints")).first).to_be_visible()
        await page.get_by_role("link", name="Cluster").click()
        await page.get_by_role("link", name="h200-005", exact=True).click()
        await expect(page.get_by_role("heading", name="Node h200-005")).to_be_visible()
        await page.get_by_role("searchbox").fill("h200-0")
        await page.get_by_role("button", name="Find").click()
        await page.get_by_role("main").get_by_role("link", name="h200-006").click()
        await expect(page.get_by_role("heading", name="Node h200-006")).to_be_visible()
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_role("heading", name="Log in")).to_be_visible()


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_names__are_text_in_each_view(opened: Tab, world: PageWorld, kind: str) -> None:
    name, node = HOSTILE[kind], HOSTILE[kind][:256]
    error = {"code": "INTERNAL", "message": name, "retryable": False, "details": {}}
    source = f"hf://org/{name}"[:4096]
    await world.add_mirror(source, "READY")
    await world.add_mirror(f"hf://other/{name}", "FAILED", error=error)
    tiers = {node: use(TB, 0.5, problem=name, pressed=1)}
    holdings = [held(source, 5, jobs=[name])]
    await world.agent(node, node, tiers=tiers, holdings=holdings, version=node, advertise=name, roles=[node]).beat()
    await opened.log_in(OPERATOR)
    page, seen = opened.page, "".join(sign for sign in name if sign.isprintable())[:60]

    for path in (
        "/ui",
        "/ui/cluster",
        f"/ui/cluster?cluster={quote(node)}",
        f"/ui/node?cluster={quote(node)}&node={quote(node)}",
        f"/ui/search?q={quote(name[:60])}",
    ):
        await page.set_viewport_size({"width": 320, "height": 800})
        await opened.go(path)
        await expect(page.get_by_role("main")).to_contain_text(seen)
        assert await page.title() != "taken", path
        assert not await opened.is_wider_than_the_window(), path
        assert "\u202e" not in await page.content()
        assert await page.locator("main img[src], main script").count() == 0, path


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make browser, where npm is there")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1920])
async def test_axe__finds_nothing_in_any_view(browser: Browser, world: PageWorld, scheme: str, width: int) -> None:
    await fill(world, 24)
    size = {"width": width, "height": 1000}
    async with tab(browser, world.url, color_scheme=scheme, viewport=size, bypass_csp=True) as opened:
        await opened.go(VIEWS["login"])
        assert await opened.violations() == []
        await opened.log_in(OPERATOR)
        for name in ("now", "cluster", "node", "search"):
            await opened.go(VIEWS[name])
            assert await opened.violations() == [], name
            assert not await opened.is_wider_than_the_window(), name
        await opened.go("/ui/node?cluster=none&node=none")
        assert await opened.violations() == []
        opened.complaints.clear()  # Chromium names the status 404 of the answer


async def test_session_that_ends__is_said_on_the_open_page(opened: Tab, world: PageWorld) -> None:
    token = await world.add_token("viewer", "controller")
    await opened.log_in(token)
    await expect(opened.page.get_by_text("As of")).to_be_visible()
    listed = (await world.mirror.get("/tokens"))["items"]
    [one] = [item["id"] for item in listed if item["name"] == "viewer"]
    await world.mirror.http.delete(f"/tokens/{one}")

    await expect(opened.page.get_by_role("alert")).to_contain_text("session has ended")
    opened.complaints.clear()  # Chromium names the status 401 of the stream that reconnects
