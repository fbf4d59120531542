"""Faults between callers and a service: the answer or a typed error, and nothing done twice."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner

from bdn.cli.admin import main as admin
from bdn.cli.main import main
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody, WeightsSourceBody
from bdn.wire.shapes import ServiceUnreachableError
from bdn.wire.stage_schema import StageDocument, StageRequest
from node_agent.api import build_app
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, until
from tests.support.network.fault_proxy import Fault, FaultProxy, parted, passes
from tests.support.network.fault_proxy_faults import (
    PASSING,
    answers_busy,
    drips,
    ends_at_once,
    ends_in_the_middle,
    flips_a_bit,
    name_of,
    repeats_the_answer,
    resets_at_once,
)
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")
pytestmark = pytest.mark.promise("network")
LONGEST_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 0.5  # of the client


# A bit of a small document is for TCP and TLS to watch: unlike content, an answer has no name to compare it with.
FAULTS: Final = [*(fault for fault in PASSING if fault is not flips_a_bit), drips, parted]
STEP: Final = at_scale(3, 1)
FILES: Final = {"w.bin": noise(3 * MIB, 1), "config.json": b"{}"}


def wanted(name: str) -> MirrorRequestBody:
    return MirrorRequestBody(weights=[WeightsSourceBody(source=f"hf://{name}", mount_location="/m")])


@pytest.fixture
async def mirror(backend: str, upstreams: None, tmp_path: Path) -> AsyncIterator[tuple[MirrorUnderTest, FaultProxy]]:
    listener = bind_tcp("127.0.0.1", 0)
    async with mirror_under_test(tmp_path / "mirror") as mirror, serving(mirror.service.api, listener):
        with FaultProxy(listener.getsockname()[:2]).running() as proxy:
            yield mirror, proxy


async def asked_again(ask: Callable[[], Awaitable[Mirror | StageDocument]], address: str) -> tuple[set[str], int]:
    """Ask twice, or until there is an answer; the ids that were answered, and how often nobody was reached at the address."""
    ids: set[str] = set()
    asked = refused = 0
    while asked < 2 or not ids:  # a busy machine may make the client lose patience once more
        asked += 1
        try:
            ids.add((await ask()).id)
        except ServiceUnreachableError as error:
            refused += error.address == address
    return ids, refused


@pytest.mark.parametrize("fault", FAULTS[::STEP], ids=name_of)
async def test_a_mirror_asked_for_through_a_fault_and_again_is_one_mirror_and_one_read(
    mirror: tuple[MirrorUnderTest, FaultProxy], hub: Hub, fault: Fault, tally: Tally
) -> None:
    service, proxy = mirror
    hub.repo("org/model").commit(FILES)
    hub.fail(stall(), "w.bin", times=None)  # what is READY is not joined
    async with asyncio.timeout(LONGEST_SECONDS):
        async with MirrorClient(proxy.url, timeout_seconds=PATIENCE_SECONDS) as client:
            proxy.play(fault)
            ids, refused = await asked_again(lambda: client.request(wanted("org/model")), proxy.url)
        hub.release_stalled()
        document = await service.ended(ids.pop())

    found = await service.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met.total(), refused=refused, wrong=found != FILES)
    assert proxy.met[name_of(fault)] == 1
    assert not ids
    assert service.count("mirrors") == 1
    assert hub.log.bytes_served("w.bin", origin="cdn") == len(FILES["w.bin"])


@pytest.mark.parametrize("times", [1, 2])
async def test_an_answer_that_comes_twice_is_nobody_elses(
    mirror: tuple[MirrorUnderTest, FaultProxy], hub: Hub, times: int, tally: Tally
) -> None:
    service, proxy = mirror
    names = [f"org/model-{number}" for number in range(4)]
    for name in names:
        hub.repo(name).commit({"c.json": name.encode()})
    ids = [(await service.ready({"source": f"hf://{name}", "mount_location": "/m"}))["id"] for name in names]
    async with MirrorClient(proxy.url, timeout_seconds=PATIENCE_SECONDS) as client:
        proxy.play(*[repeats_the_answer] * times)
        found = [(await client.mirror(mirror_id)).id for mirror_id in ids]
    tally.add(scenarios=4, faults=proxy.met.total(), wrong=sum(a != b for a, b in zip(found, ids, strict=True)))


@pytest.mark.parametrize("fault", FAULTS[STEP // 2 :: STEP], ids=name_of)
async def test_a_stage_asked_for_through_a_fault_and_again_is_one_stage(
    server: AgentMirror, tmp_path: Path, fault: Fault, tally: Tally
) -> None:
    origin = server.renewed()
    manifest = origin.publish(FILES)
    listener = bind_tcp("127.0.0.1", 0)
    async with (
        asyncio.timeout(LONGEST_SECONDS),
        Rig(origin, tmp_path / "node").agent() as agent,
        serving(build_app(agent), listener),
    ):
        await agent.heartbeats.beat()
        with FaultProxy(listener.getsockname()[:2]).running() as proxy:
            async with AgentClient(proxy.url, timeout_seconds=PATIENCE_SECONDS) as client:
                request = StageRequest(job_id="job", grant=origin.grant(manifest))
                proxy.play(fault)
                ids, refused = await asked_again(lambda: client.stage(request), proxy.url)
                latest = [one async for one in client.follow(ids.pop())][-1]
                stages = (await client.stages()).items

    tally.add(scenarios=1, faults=proxy.met.total(), refused=refused)
    tally.add(wrong=tree(Path(latest.mounts[0].path)) != FILES)
    assert not ids
    assert [stage.id for stage in stages] == [latest.id]
    assert set(origin.chunk_requests.values()) == {1}


async def test_commands_end_with_an_error_document_or_the_answer(
    mirror: tuple[MirrorUnderTest, FaultProxy], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, proxy = mirror
    hub.repo("org/model").commit(FILES)
    outcomes = []
    for url, fault in ((proxy.url, ends_at_once), (proxy.url, repeats_the_answer), ("http://[::1", ends_at_once)):
        proxy.play(fault)
        monkeypatch.setenv("BDN_URL", url)
        ended = await asyncio.to_thread(CliRunner().invoke, main, ["mirror", "hf://org/model", "--wait", "--json"])
        outcomes.append((ended.exit_code, json.loads(ended.stdout)))

    (failed, error), (done, document), (refused, nowhere) = outcomes
    assert (failed, done, refused) == (1, 0, 2)
    assert document["status"] == "READY"
    assert error["error"]["code"] == "STORE_UNAVAILABLE"
    assert nowhere["error"]["code"] == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("program", "arguments", "status"),
    [(main, "mirror hf://org/model --wait", "READY"), (admin, "gc", "DONE"), (admin, "verify --all", "DONE")],
    ids=["mirror", "gc", "verify"],
)
async def test_a_command_that_waits_goes_on_asking_through_faults_and_says_so(
    mirror: tuple[MirrorUnderTest, FaultProxy],
    hub: Hub,
    program: click.Command,
    arguments: str,
    status: str,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, proxy = mirror
    hub.repo("org/model").commit(FILES)
    hub.fail(stall(), "w.bin", times=None)
    faults = (resets_at_once, ends_in_the_middle, answers_busy)
    proxy.play(passes, *faults)
    monkeypatch.setenv("BDN_URL", proxy.url)
    async with asyncio.timeout(LONGEST_SECONDS):
        waiting = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, program, [*arguments.split(), "--json"]))
        await until(lambda: all(proxy.met[name_of(fault)] for fault in faults) or waiting.done(), "every fault is met")
        hub.release_stalled()
        ended = await waiting

    found = json.loads(ended.stdout)
    tally.add(scenarios=1, faults=len(faults), lost=(ended.exit_code, found.get("status")) != (0, status))
    assert [proxy.met[name_of(fault)] for fault in faults] == [1, 1, 1]
    assert service.count("mirrors") == (program is main)
    assert ended.stderr.count(f"{found['id']} may continue meanwhile; retrying for 10 minutes") == 1
    assert ended.stderr.count(f"{found['id']}: the service answers again") == 1
