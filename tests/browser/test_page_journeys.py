"""Three questions of an operator, and an eviction, answered by the page alone; mirrors and jobs while they change."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from bdn.core.errors import Fact
from bdn.core.events import Event
from bdn.wire.event_schema import NodeEvent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.mirror.page_operations import stage
from tests.support.mirror.page_world import OPERATOR, PageWorld, page_world
from tests.support.mirror.service import Json, source
from tests.support.mirror.training_jobs import JobAgent, JobClient, spec
from tests.support.services.browser import Tab, tab

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.embedded("the page reads through the services, whatever is behind them")]
SOURCE: Final = "hf://org/model"
HOLDER: Final = "job job-7 (stage stg_0123456789abcdef01234567)"


@pytest.fixture
async def world(upstreams: None, tmp_path: Path) -> AsyncIterator[PageWorld]:
    async with page_world(tmp_path / "mirror", work=True, jobs=1) as world:
        yield world


@pytest.fixture
async def opened(browser: Browser, world: PageWorld) -> AsyncIterator[Tab]:
    async with tab(browser, world.url) as opened:
        await opened.log_in(OPERATOR)
        yield opened


@pytest.fixture
async def manifest(world: PageWorld, hub: Hub) -> str:
    hub.repo("org/model").commit({"weights": noise(3 * MIB, 1), "config.json": b"{}"})
    return await world.mirror.manifest(source(SOURCE))


async def find(page: Page, text: str) -> None:
    await page.get_by_role("searchbox").fill(text)
    await page.get_by_role("button", name="Find").click()


def holding(manifest: str, *jobs: str) -> Json:
    return {"manifest": manifest, "bytes": 3 * MIB, "sources": [SOURCE], "held_by": list(jobs)}


async def test_which_node_is_slowest_for_a_job(opened: Tab, world: PageWorld, manifest: str) -> None:
    agents = [JobAgent(world.mirror, f"n{number}") for number in range(3)]
    for agent in agents:
        await agent.beat()
    client = await JobClient.of(world.mirror)
    job = await client.create(spec(source(SOURCE), nodes=3))
    for agent, done in zip(agents, (80, 10, 50), strict=True):
        await agent.report(await agent.commanded("stage"), "STAGING", running=True, bytes_done=done, bytes_total=100)
    page = opened.page

    await find(page, job)
    await expect(page.get_by_text("The slowest node is c/n1 (rank 1): 10 % of its bytes")).to_be_visible()
    await expect(page.get_by_role("listitem").filter(has_text="DEPLOYING")).to_have_attribute("aria-current", "step")
    rows = page.locator("#nodes tbody tr")
    assert [text.split()[0] for text in await rows.all_inner_texts()] == ["n1", "n2", "n0"]
    await agents[1].beat(stages=[stage(job, 90, 100)], reports=list(agents[1].running.values()))
    await expect(page.get_by_text("The slowest node is c/n2 (rank 2): 50 % of its bytes")).to_be_visible()
    await page.get_by_role("link", name="n2", exact=True).click()
    await expect(page.get_by_role("heading", name="Node n2")).to_be_visible()
    await page.go_back()
    await page.get_by_role("link", name=SOURCE).click()
    await expect(page.get_by_text("It is cached on the mirror.")).to_be_visible()


async def test_which_node_is_slowest__for_a_job_that_another_scheduler_started(opened: Tab, world: PageWorld) -> None:
    for node, done in (("n1", 90), ("n2", 20)):
        await world.agent(node, "c", stages=[stage("slurm-42", done, 100, bytes_per_second=10)]).beat()

    await find(opened.page, "slurm-42")
    await expect(
        opened.page.get_by_text("The slowest node is c/n2: 20 % of its bytes, 10 B/s, 8s left.")
    ).to_be_visible()


async def test_why_is_a_model_not_on_a_node(opened: Tab, world: PageWorld, manifest: str) -> None:
    facts: dict[str, Fact] = {
        "tier": "node",
        "bytes": 3 * MIB,
        "stage": "stg_2",
        "job": "job-8",
        "newcomer": "hf://org/other",
    }
    event = Event.of("made_room", facts, manifest=manifest, organisation="default")
    dated = NodeEvent.of(replace(event, id="run/1", at=1_790_000_000.0))
    await world.agent("n2", "c").beat(events=[dated.model_dump()])
    page = opened.page

    await find(page, SOURCE)
    await page.get_by_label("Why is it, or is it not, on node").fill("n2")
    await page.get_by_role("button", name="Explain").click()
    await expect(page.locator(".answer")).to_have_text(
        "It is not cached on node c/n2 because at 2026-09-21 14:13:20Z it was evicted (3.15 MB) as the least recently used, "
        "to make room for job job-8 (stage stg_2), which brought hf://org/other."
    )


async def test_what_would_an_eviction_free_and_whom_would_it_hurt__then_evict_and_undo(
    opened: Tab, world: PageWorld, manifest: str
) -> None:
    agent = world.agent("n1", "c", holdings=[holding(manifest, "job-7")])
    await agent.beat()
    page, item = opened.page, {"tier": "node", "cluster": "c", "node": "n1", "manifest": manifest, "bytes": 3 * MIB}

    await find(page, SOURCE)
    await page.get_by_role("button", name="Plan the eviction").click()
    await expect(page.get_by_text("Nodes are answering")).to_be_visible()
    await agent.carry_out(await agent.beat(), item | {"holders": [HOLDER], "sources": [SOURCE]})
    await expect(page.get_by_text("Evicting frees 3.15 MB now, and 3.15 MB on the mirror after")).to_be_visible()
    await expect(page.locator("#holders")).to_contain_text("job job-7 on n1")
    await expect(page.get_by_text("It can be restored until")).to_be_visible()

    await page.get_by_label("type its name").fill("hf://org/mod")
    await page.get_by_role("button", name="Evict").click()
    await expect(page.get_by_role("alert")).to_contain_text("nothing was evicted")
    opened.complaints.clear()  # Chromium names the status of the answer
    await page.go_back()
    await page.get_by_label("type its name").fill(SOURCE)
    await page.get_by_role("button", name="Evict").click()
    await expect(page.get_by_text("In progress.")).to_be_visible()
    reply = await agent.beat()
    assert reply["pending"][0]["evict"]["force"]
    await agent.carry_out(reply, item | {"holders": [HOLDER], "sources": [SOURCE]})
    await expect(page.get_by_text("In progress.")).to_have_count(0)
    await expect(page.get_by_text("Freed 3.15 MB now")).to_be_visible()

    await page.get_by_role("button", name="Restore on the mirror").click()
    await expect(page.get_by_text("Restored on the mirror.")).to_be_visible()
    await page.get_by_role("link", name="The model").click()
    await expect(page.get_by_text("It is cached on the mirror")).to_be_visible()


async def test_a_prefetch__is_begun_from_the_model_and_followed_to_its_end(
    opened: Tab, world: PageWorld, manifest: str
) -> None:
    agent, page = world.agent("n1", "c"), opened.page
    await agent.beat()
    await opened.go(f"/ui/model?of={SOURCE}")
    await expect(page.get_by_label("To cluster").locator("option[value=c]")).to_have_count(
        1
    )  # agents may be a second old
    await page.get_by_role("button", name="Prefetch").click()
    await expect(page.get_by_text("0 of 1 node have it")).to_be_visible()

    command = (await agent.beat())["pending"][0]["id"]
    came: Json = {"bytes_total": 3 * MIB, "bytes_from": {"node": 0, "cluster": 0, "mirror": MIB}}
    await agent.beat(reports=[{"id": command, "running": True, "prefetch": came}])
    await expect(page.get_by_role("row", name="c/n1 RUNNING 33 % 33 %, 1.05 MB of 3.15 MB")).to_be_visible()
    await agent.beat(reports=[{"id": command, "prefetch": came}])
    await expect(page.get_by_text("READY 1 of 1 node has it")).to_be_visible()


async def test_a_mirror__goes_from_pending_to_ready_without_a_reload(opened: Tab, world: PageWorld, hub: Hub) -> None:
    page, hub_file = opened.page, {"model.safetensors": noise(9 * MIB, 2)}
    hub.repo("org/first").commit(hub_file)
    hub.repo("org/second").commit({"model.safetensors": noise(9 * MIB, 3)})
    hub.fail(stall(5 * MIB), origin="cdn", times=2)
    await opened.go("/ui/mirrors")
    await page.evaluate("window.stayed = true")
    first = await world.mirror.begin(source("hf://org/first"))
    second = await world.mirror.begin(source("hf://org/second"))

    def card(mirror: Json, status: str) -> Locator:
        return (
            page.get_by_role("listitem").filter(has=page.get_by_role("link", name=mirror["id"])).filter(has_text=status)
        )

    await expect(card(first, "SYNCING").get_by_role("img")).to_have_count(1)
    await expect(card(second, "PENDING")).to_have_count(1)
    await expect(page.get_by_role("heading", name="2 mirrors at work")).to_be_visible()
    hub.release_stalled()
    await expect(card(first, "READY")).to_have_count(1)
    await expect(card(second, "READY")).to_have_count(1)
    await expect(page.get_by_role("heading", name="0 mirrors at work")).to_be_visible()
    assert await page.evaluate("window.stayed")


async def test_a_mirror_that_failed__says_what_to_do(opened: Tab, world: PageWorld, hub: Hub) -> None:
    await world.mirror.mirror(source("hf://org/none"))
    await opened.go("/ui/mirrors")

    await expect(opened.page.locator("#ended .problem")).to_contain_text(
        "Set a secret or a role that may read the source"
    )


async def test_a_log__grows_while_somebody_looks(opened: Tab, world: PageWorld) -> None:
    agent, client = JobAgent(world.mirror, "n1"), await JobClient.of(world.mirror)
    await agent.beat()
    job = await client.create(spec())
    (go,) = await agent.report(await agent.commanded("stage"), "STAGED")
    await agent.report(go, "RUNNING", running=True)
    await opened.go(f"/ui/job?id={job}")
    log = opened.page.get_by_role("region", name="Lines of the log")
    await expect(log).to_contain_text("the job is created")

    await agent.print(go, 0, (1_800_000_000_000_000_000, "loss=0.5 <b>bold</b>"))
    await expect(log).to_contain_text("(r0) loss=0.5 <b>bold</b>")
