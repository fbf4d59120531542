"""Two replicas behind a proxy: the one that a viewer watches is killed, and the view goes on at the other."""

import asyncio
import signal
from pathlib import Path

import httpx2
from playwright.async_api import expect

from bdn.wire.grants import new_signing_key
from tests.support.mirror.backends import write_keys
from tests.support.mirror.fake_agent import USE
from tests.support.mirror.page_world import OPERATOR
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import Json
from tests.support.network.balancer import balancing
from tests.support.services.browser import chromium, tab

pytest_plugins = ("tests.support.mirror.fixtures",)
LONGEST_SECONDS = 240.0


async def beat(http: httpx2.AsyncClient, held: int) -> None:
    body: Json = {"node": "n1", "cluster": "c", "boot_id": "b", "roles": ["node"], "version": "1", "advertise": None}
    body |= {"tiers": {"node": {**USE, "committed": held, "reserved": 0}}}
    answer = await http.post("/agents/heartbeat", json=body, headers={"Authorization": f"Bearer {OPERATOR}"})
    assert answer.status_code == 200, answer.text


async def test_replica_is_killed__the_view_and_the_session_go_on_at_the_other(
    postgres_url: str, tmp_path: Path
) -> None:
    environ = {
        "BDN_DATABASE_URL": postgres_url.replace("+asyncpg", ""),
        "BDN_STORE": f"file://{tmp_path}/store",
        "BDN_GRANT_KEY_FILE": str(write_keys(tmp_path / "grant-keys.pem", new_signing_key())),
        "BDN_AUTH": "token",
        "BDN_TOKEN": OPERATOR,
    }
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        chromium() as browser,
        await ServingProcess.start(tmp_path / "one", **environ) as one,
        await ServingProcess.start(tmp_path / "other", **environ) as other,
        balancing([int(each.url.rpartition(":")[2]) for each in (one, other)]) as url,
        tab(browser, url) as opened,
    ):
        await beat(one.http, 100)
        await opened.log_in(OPERATOR, "/ui/cluster")
        await expect(opened.page.get_by_role("row", name="n1 alive 10 %")).to_be_visible()
        await opened.page.evaluate("window.stayed = true")
        await one.end(signal.SIGKILL)
        await beat(other.http, 550)

        row = opened.page.get_by_role("row", name="n1 alive 55 %")
        await expect(row).to_be_visible()
        assert await opened.page.evaluate("window.stayed")
        await row.get_by_role("link").click()
        await expect(opened.page.get_by_role("heading", name="Node n1")).to_be_visible()
        opened.complaints.clear()  # Chromium names the connections that were cut
