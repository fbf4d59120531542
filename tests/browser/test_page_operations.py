"""The views of mirrors, models, jobs and operations: for all who read them, with names of any kind, and without JavaScript."""

from typing import Any, Final
from urllib.parse import quote

import pytest
from playwright.async_api import Browser, expect

from tests.support.mirror.page_operations import fill_operations, stage
from tests.support.mirror.page_world import HOSTILE, OPERATOR, PageWorld, held
from tests.support.services.browser import AXE, Tab, tab

pytestmark = [pytest.mark.embedded("the page reads through the services, whatever is behind them")]
NARROW: Final[Any] = {"width": 320, "height": 800}


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: make browser, where npm is there")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1920])
async def test_axe__finds_nothing_in_the_views_of_operations(
    browser: Browser, world: PageWorld, scheme: Any, width: int
) -> None:
    views = await fill_operations(world)
    size: Any = {"width": width, "height": 1000}
    async with tab(browser, world.url, color_scheme=scheme, viewport=size, bypass_csp=True) as opened:
        await opened.log_in(OPERATOR)
        for name, path in views.items():
            await opened.go(path)
            assert await opened.violations() == [], name
            assert not await opened.is_wider_than_the_window(), name


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_names__are_text_in_the_views_of_operations(opened: Tab, world: PageWorld, kind: str) -> None:
    name, node, job = HOSTILE[kind], HOSTILE[kind][:256], HOSTILE[kind][:256]
    source = f"hf://org/{name}"[:4096]
    error = {"code": "INTERNAL", "message": name, "retryable": False, "details": {}}
    ready = await world.add_mirror(source, "READY")
    failed = await world.add_mirror(f"hf://other/{name}"[:4096], "FAILED", error=error)
    agent = world.agent(node, node, holdings=[held(source, 5, jobs=[job])], stages=[stage(job, 1, 9)])
    await agent.beat()
    plan = await world.mirror.ask("evictions", source=source, tier="mirror", dry_run=True, force=True)
    prefetch = await world.mirror.ask("prefetches", source=source, nodes=[node])
    await opened.log_in(OPERATOR)
    page, seen = opened.page, "".join(sign for sign in name if sign.isprintable())[:60]

    await page.set_viewport_size(NARROW)
    for path in (
        "/ui/mirrors",
        f"/ui/mirror?id={ready}",
        f"/ui/mirror?id={failed}",
        "/ui/model",
        f"/ui/model?of={quote(source)}",
        f"/ui/model?of={quote(source)}&node={quote(node)}",
        f"/ui/model?of={quote('/' + name[:4000])}",
        f"/ui/job?id={quote(job)}",
        f"/ui/eviction?id={plan['id']}",
        f"/ui/prefetch?id={prefetch['id']}",
    ):
        await opened.go(path)
        await expect(page.get_by_role("main")).to_contain_text(seen)
        assert await page.title() != "taken", path
        assert not await opened.is_wider_than_the_window(), path
        assert "\u202e" not in await page.locator("body").inner_text(), path  # fields of forms send names as they are
        assert await page.locator("main img[src], main script").count() == 0, path


async def test_without_javascript__an_eviction_is_planned_carried_out_and_undone(
    browser: Browser, world: PageWorld
) -> None:
    views = await fill_operations(world, 8)
    async with tab(browser, world.url, java_script_enabled=False) as opened:
        await opened.log_in(OPERATOR, views["models"])
        page = opened.page
        await page.get_by_role("link", name="hf://meta-llama/Llama-3.3-70B-Instruct@main").click()
        await page.get_by_label("From").select_option("the mirror")
        await page.get_by_role("button", name="Plan the eviction").click()
        await expect(page.get_by_role("heading", name="Plan: evict hf://meta-llama")).to_be_visible()
        await page.get_by_label("type its name").fill("hf://meta-llama/Llama-3.3-70B-Instruct@main")
        await page.get_by_role("button", name="Evict").click()
        await expect(page.get_by_role("heading", name="Eviction of hf://meta-llama")).to_be_visible()
        await page.get_by_role("button", name="Restore on the mirror").click()
        await expect(page.get_by_text("Restored on the mirror.")).to_be_visible()
        await page.get_by_role("link", name="Jobs", exact=True).click()
        await page.get_by_role("link", name="sft-70b").click()
        await expect(
            page.get_by_text("The slowest node is iad-h200/train-2 (rank 2): 8 % of its bytes")
        ).to_be_visible()
