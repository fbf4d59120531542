"""A real Chromium, and what a page does in it: what it says to the console, and whom it asks."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, async_playwright, expect

AXE: Final = Path(__file__).parents[3] / ".browser/node_modules/axe-core/axe.min.js"
CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
_LONGEST_MILLISECONDS: Final = 60_000  # that an expectation waits on a machine with a hundred other things to do
_OPTIONS: Final = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Skips the test where none starts."""
    expect.set_options(timeout=_LONGEST_MILLISECONDS)
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: make browser, where Debian's package is there")
    async with async_playwright() as playwright:
        try:
            browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(_OPTIONS))
        except Error as error:
            pytest.skip(f"Chromium does not start here: {error.message.splitlines()[0]}")
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Tab:
    """A tab of a browser of its own. ``complaints`` are errors and warnings of the console, ``foreign`` requests to elsewhere."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    async def go(self, path: str) -> None:
        await self.page.goto(f"{self.url}{path}")

    async def log_in(self, token: str, path: str = "/ui") -> None:
        """Open a view without a session, and log in: the view is shown."""
        await self.go(path)
        await self.page.get_by_label("Token").fill(token)
        await self.page.get_by_role("button", name="Log in").click()
        await self.page.get_by_role("button", name="Log out").wait_for()

    async def violations(self) -> list[str]:
        """What axe-core finds wrong with the page as it is shown now."""
        await self.page.add_script_tag(path=AXE)
        found: dict[str, Any] = await self.page.evaluate("axe.run()")
        return [
            f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]
        ]

    async def is_wider_than_the_window(self) -> bool:
        return bool(await self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@asynccontextmanager
async def tab(browser: Browser, url: str, **context: Any) -> AsyncIterator[Tab]:
    """``context``: options of a browser context, such as ``java_script_enabled``. Fails if the page complains."""
    made: BrowserContext = await browser.new_context(**context)
    try:
        opened = Tab(await made.new_page(), url)
        origin = urlsplit(url).netloc

        def note(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                opened.complaints.append(f"{message.type}: {message.text}")

        def see(request: Request) -> None:
            if urlsplit(request.url).netloc != origin:
                opened.foreign.append(request.url)

        opened.page.on("console", note)
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", see)
        yield opened
        assert (opened.complaints, opened.foreign) == ([], [])
    finally:
        await made.close()
