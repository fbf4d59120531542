"""The daemon as an operator meets it: help, exit codes, sockets, signals."""

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from bdn.core.errors import InUseError
from bdn.wire.stage_schema import StageRequest
from node_agent.fill.part import Bitmap
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.mounts import needs_mounts, read_only
from tests.support.agent.process import Program
from tests.support.agent.rig import MIB, Rig, noise


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
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


async def test_a_second_agent_on_the_same_directory_is_refused_and_the_first_goes_on(program: Program) -> None:
    async with program.daemon() as daemon:
        with pytest.raises(InUseError, match=f"process {daemon.process.pid}"):
            async with Rig(AgentMirror(url=program.url), program.root).agent():
                pass
        second = await asyncio.to_thread(program.run)

        assert second.returncode == 3
        assert f"is in use by process {daemon.process.pid}" in second.stderr
        assert await daemon.client.ready()


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
        gate, stuck, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()

        def note(_: object) -> None:
            if mirror.requests == 4:  # two chunks have arrived, and both threads wait for another
                loop.call_soon_threadsafe(stuck.set)

        mirror.on_request = note
        for chunk in mirror.chunks(manifest, "large")[2:]:
            mirror.faults[chunk] = [held_by(gate)]
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(30):
                await stuck.wait()
            async with asyncio.timeout(10):  # although the mirror is silent
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
