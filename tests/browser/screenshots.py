"""Pictures of each view for the documentation: ``python -m tests.browser.screenshots`` writes ``docs/screenshots``."""

import asyncio
import tempfile
from pathlib import Path
from typing import Final, Literal

from tests.support.mirror.page_operations import fill_operations
from tests.support.mirror.page_world import OPERATOR, page_world
from tests.support.services.browser import chromium, tab

FOLDER: Final = Path(__file__).parents[2] / "docs/screenshots"
SIZE: Final = {"width": 1280, "height": 900}
VIEWS: Final = {
    "now": "/ui",
    "cluster": "/ui/cluster",
    "node": "/ui/node?cluster=iad-h200&node=h200-005",
}
OPERATIONS: Final = ("mirrors", "model", "job", "plan")
SCHEMES: Final[dict[str, Literal["light", "dark"]]] = {"": "light", "-dark": "dark"}


async def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with page_world(Path(folder) / "mirror") as world, chromium() as browser:
            found = await fill_operations(world, 96)
            views = {**VIEWS, **{name: found[name] for name in OPERATIONS}}
            for ending, scheme in SCHEMES.items():
                async with tab(browser, world.url, viewport=SIZE, color_scheme=scheme) as opened:
                    await opened.log_in(OPERATOR)
                    for name, path in views.items():
                        await opened.go(path)
                        await opened.page.screenshot(path=FOLDER / f"{name}{ending}.png")


if __name__ == "__main__":
    asyncio.run(write())
