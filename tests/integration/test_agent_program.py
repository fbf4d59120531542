"""The daemon as an operator meets it: help, exit codes, sockets, signals, TLS; its chunks and what they are charged to."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.transfer.byte_threads import Pacer
from bdn.wire.stage_schema import StageRequest
from node_agent.fill.part import Bitmap
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.mounts import needs_mounts, read_only
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, metrics, staged
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import mirror_under_test, source
from tests.support.services.logs import lines_of

pytest_plugins = ("tests.support.agent.fixtures", "tests.support.mirror.fixtures")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("setting", ["BDN_AGENT_PORT", "BDN_AGENT_DATA_PORT"])
def test_a_port_that_is_taken_is_refused_by_name(program: Program, taken: int, setting: str) -> None:
    done = program.run(**{setting: str(taken)})

    assert done.returncode == 3
    assert f"error: port {taken} of 127.0.0.1 is in use by another process [IN_USE]" in done.stderr
    assert "Traceback" not in done.stderr


@needs_mounts
def test_a_read_only_cache_directory_is_a_failure_that_names_it(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    with read_only(folder):
        done = program.run(BDN_AGENT_CACHE_DIR=str(folder / "cache"))

    assert done.returncode == 1
    assert "Read-only file system" in done.stderr
    assert str(folder) in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_control_api_listens_on_loopback_when_a_port_is_set(program: Program) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with program.daemon(BDN_AGENT_PORT=str(port)) as daemon:
        async with httpx2.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/healthz")).json() == {"status": "ok"}
        assert await daemon.stop(signal.SIGINT) == 130
        assert not (program.root / "agent.sock").exists()


async def test_sigterm_drains_and_the_next_agent_goes_on_where_this_one_stopped(tmp_path: Path) -> None:
    with AgentMirror().running() as mirror:
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_BYTE_THREADS": "2"})
        content = noise(33 * MIB, 1)
        manifest = mirror.publish({"large": content})
        gate = threading.Event()
        stuck = mirror.asked(lambda _: mirror.requests == 4)  # two chunks have arrived, both threads wait for another
        for chunk in mirror.chunks(manifest, "large")[2:]:
            mirror.faults[chunk] = [held_by(gate)]
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(30):
                await stuck.wait()
            async with asyncio.timeout(60):  # although the mirror is silent
                assert await daemon.stop() == 0

        record = json.loads((tmp_path / f"cache/stages/{stage.id}.json").read_text())
        bitmap = next((tmp_path / "cache/filling").glob("*.bitmap")).read_bytes()
        assert record["state"] in ("PENDING", "STAGING")
        assert sum(index in Bitmap.parse(bitmap, 5) for index in range(5)) == 2
        gate.set()
        mirror.forget()
        async with program.daemon() as daemon:
            ready = await daemon.client.stage_by_id(stage.id, 60)
            assert ready.state == "READY"
            assert mirror.requests == 3
            assert (Path(ready.mounts[0].path) / "large").read_bytes() == content
            assert await daemon.stop() == 0
        assert (Path(ready.mounts[0].path) / "large").exists()  # stages survive their agent


@pytest.mark.parametrize(("host", "is_told"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_an_agent_that_peers_reach_without_tls_says_so(
    server: AgentMirror, tmp_path: Path, host: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(server, tmp_path).agent(host=host, auth="token"):
        assert ("in the clear: set BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY" in caplog.text) is is_told


# --- What data planes send is charged to their limits, byte for byte ---
CHUNK = noise(CHUNK_SIZE)


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that a pacer was asked for; none of them waits."""
    sizes: list[int] = []

    def charge(_: Pacer, size: int) -> float:
        sizes.append(size)
        return 0.0

    monkeypatch.setattr(Pacer, "__call__", charge)
    return sizes


async def fetch(port: int) -> bytes:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        return (await client.get(f"/chunks/{digest_of(CHUNK)}")).content


async def test_a_mirror_charges_what_it_sends(hub: Hub, upstreams: None, tmp_path: Path, charged: list[int]) -> None:
    hub.repo("org/model").commit({"a.bin": CHUNK})
    async with mirror_under_test(tmp_path / "mirror", serve=True, upload_rate="1GB") as mirror:
        await mirror.ready(source("hf://org/model"))
        assert mirror.service.data_port is not None
        assert await fetch(mirror.service.data_port) == CHUNK
    assert sum(charged) == CHUNK_SIZE


async def test_an_agent_charges_what_it_sends_to_peers(tmp_path: Path, charged: list[int]) -> None:
    with AgentMirror().running() as mirror:
        manifest = mirror.publish({"a.bin": CHUNK})
        async with Rig(mirror, tmp_path).agent(upload_rate="1GB") as agent:
            await staged(agent, mirror, manifest)
            assert await fetch(agent.data_port) == CHUNK
            figures = agent.metrics.render(await agent.holdings.tiers()).decode()
            assert metrics(figures)["bdn_agent_served_bytes_total"] == CHUNK_SIZE
    assert sum(charged) == CHUNK_SIZE


async def test_a_daemon_tells_of_its_life_one_line_for_each_thing(tmp_path: Path) -> None:
    with AgentMirror().running() as mirror:
        first, second = (mirror.publish({"weights": noise(2 * MIB, number)}) for number in (1, 2))
        too_large = mirror.publish({"weights": noise(5 * MIB, 3)})
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_CACHE_BYTES": "3MiB", "BDN_AGENT_CLUSTER_CACHE_BYTES": "0"})
        async with program.daemon() as daemon:
            stages = [await daemon.staged("one", mirror.grant(first))]
            await daemon.client.unstage(stages[0].id)
            stages.append(await daemon.staged("two", mirror.grant(second)))
            refused = await daemon.client.stage(StageRequest(job_id="three", grant=mirror.grant(too_large)))
            stages.append(await daemon.ended(refused))
            assert await daemon.stop() == 0
        mirror_url = mirror.url

    lines = lines_of(tmp_path / "daemon.log")
    told = {one["msg"]: one for one in lines}
    started = told["agent started"]
    assert (started["mirror"], started["cache"]) == (mirror_url, str(tmp_path / "cache"))
    assert (started["socket"], started["budget_bytes"]) == (str(tmp_path / "agent.sock"), str(3 * MIB))
    ready = [one for one in lines if one["msg"] == "stage ready"]
    assert [(one["stage"], one["job"]) for one in ready] == [(stages[0].id, "one"), (stages[1].id, "two")]
    assert {(one["bytes"], one["from_mirror"]) for one in ready} == {(str(2 * MIB), str(2 * MIB))}
    assert all(float(one["seconds"]) >= 0 for one in ready)
    assert told["stage released"]["stage"] == stages[0].id
    gone = {name: told["evicted"][name] for name in ("tier", "manifest", "bytes", "reason")}
    assert gone == {"tier": "node", "manifest": str(first.digest), "bytes": str(2 * MIB), "reason": "lru"}
    failed = told["stage failed"]
    assert (failed["level"], failed["stage"], failed["code"]) == ("warning", stages[2].id, "CACHE_TOO_SMALL")
    assert failed["error"].startswith("5.24 MB can never fit this cache")
    assert lines[-1]["msg"] == "agent stops"


async def test_the_log_is_json_for_machines(program: Program) -> None:
    async with program.daemon(BDN_LOG="json") as daemon:
        assert await daemon.stop() == 0
    lines = [json.loads(line) for line in (program.root / "daemon.log").read_text().splitlines()]
    assert {"agent started", "agent stops"} <= {
        line["msg"] for line in lines
    }  # a mirror that is missed may be said first

    assert "BDN_LOG: Input should be 'logfmt' or 'json'" in program.run(BDN_LOG="xml").stderr
