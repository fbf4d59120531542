"""Chromium, a mirror with made-up content, and a tab that shows its page without a session."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.support.mirror.page_world import PageWorld, page_world
from tests.support.services.browser import Tab, chromium, tab


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PageWorld]:
    async with page_world(tmp_path / "mirror") as world:
        yield world


@pytest.fixture
async def opened(browser: Browser, world: PageWorld) -> AsyncIterator[Tab]:
    async with tab(browser, world.url) as opened:
        yield opened
