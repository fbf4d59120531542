"""Stages that are canceled: nothing uncounted stays, and the next stage is right."""
# ruff: noqa: ASYNC110 - a test's loop serves no other clients

import asyncio
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bdn.disk.direct import DirectWrites
from bdn.net.http1.pool import ConnectionPool, dial
from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from node_agent.cache.node_cache import NodeCache
from node_agent.fetch.documents import Catalogue
from node_agent.fill.part import PackedParts, PartialFile
from node_agent.stage.view.views import Views
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.agent.steps import Steps
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)
FILES = {"large": noise(9 * MIB + 1, 2), "middle": noise(MIB, 2), "small": noise(1000, 3)}
WAYS = [("whole", "direct"), ("packed", "direct"), ("whole", "cached")]  # packs are never written directly
STEPS = {
    PartialFile: ("open", "write", "commit"),
    PackedParts: ("write", "commit"),
    Views: ("publish", "expose"),
    Catalogue: ("obtain",),
    NodeCache: ("admit",),
}
THREADS = 2  # a buffer or a thread that is lost twice stops everything


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one with which we look
            found.append(str(link.readlink()))
    return found


def open_files(root: Path) -> list[str]:
    """What this process has open below ``root``, but for what it opens now and then for a moment, whatever stages do:
    the folder whose files are counted, and the note of which events the mirror was told."""
    passing = ("/filling", "/journal/told.tmp")
    return sorted(path for path in descriptors() if path.startswith(str(root)) and not path.endswith(passing))


def sockets() -> int:
    """How many sockets this process has."""
    return sum(path.startswith("socket:") for path in descriptors())


def check_nothing_is_left(agent: Agent) -> None:
    """What lies on the disk is counted, what is counted lies on the disk, and nobody needs any of it."""
    places, index = agent.places, agent.cache.index
    parts = {path.stem for path in places.filling.iterdir() if path.suffix != ".bitmap"}
    assert parts == {path.stem for path in places.filling.iterdir() if path.suffix == ".bitmap"}  # the rest is no use
    whole = {path.name for path in (places.root / "files").rglob("*") if path.is_file()}
    contents = {content: size for one in index.manifests() for content, size in index.contents_of(one).items()}
    counted = {content for content in contents if index.ledger.size_of(content) is not None}
    assert whole == {content.hex for content in counted if index.ledger.is_committed(content)}
    assert parts == {content.hex for content in counted if not index.ledger.is_committed(content)}
    assert not index.leases.leased()
    assert not [*places.mounts.iterdir(), *places.views.iterdir()]


@pytest.mark.parametrize(("form", "write"), WAYS)
async def test_a_stage_can_be_canceled_at_any_point(
    server: AgentMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, write: str
) -> None:
    mirror = server.renewed(is_packed=form == "packed")
    manifest = mirror.publish(FILES)
    if write == "cached":
        monkeypatch.setattr(DirectWrites, "are_direct", property(lambda _: False))
    before = sockets()
    async with Rig(mirror, tmp_path, {"byte_threads": THREADS}).agent() as agent:
        steps = Steps(agent, monkeypatch, STEPS, seconds=60)
        mirror.on_request = lambda _: steps.reach("the mirror is asked")

        async def release(job: str) -> None:
            stage = next(one for one in agent.stages.registry.all() if one.record.job_id == job)
            await agent.stages.release(stage.record.id)

        async def evict() -> None:
            await agent.evictions.evict(EvictCommand(id="e", all=True))
            check_nothing_is_left(agent)
            assert disk_bytes(agent.places.root) == 0

        async def stage_and_evict(job: str) -> None:
            stage = await staged(agent, mirror, manifest, job=job)
            assert tree(Path(stage.mounts[0].path)) == FILES
            await agent.stages.release(stage.id)
            await evict()

        steps.aim(0, partial(release, "nobody"))
        await stage_and_evict("undisturbed")
        count, idle = steps.passed, open_files(tmp_path)
        assert count >= 25
        for number in range(1, count + 1):
            steps.aim(number, partial(release, f"canceled-{number}"))
            canceled = await agent.stages.start(f"canceled-{number}", mirror.grant(manifest))
            assert await canceled.wait(60)
            assert steps.between, "the stage passed fewer points than the first one"
            await steps.between
            assert canceled.record.state == "RELEASED"
            assert open_files(tmp_path) == idle
            check_nothing_is_left(agent)
            if number % 8 == 0 or number == count:  # goes on from what the other left
                await stage_and_evict(f"after-{number}")
            else:
                await evict()
    assert not open_files(tmp_path)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("agent-")]
    async with asyncio.timeout(60):  # the mirror in this process closes its ends a moment later
        while sockets() > before:
            await asyncio.sleep(0.01)


def test_a_connection_that_is_being_made_when_the_agent_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = ConnectionPool(timeout_seconds=30)
        real = dial

        def connect(*arguments: Any, **options: Any) -> socket.socket:
            made = real(*arguments, **options)
            pool.close()  # it cannot see this socket yet
            return made

        monkeypatch.setattr("bdn.net.http1.pool.dial", connect)
        with (
            pytest.raises(ConnectionAbortedError, match="this program is shutting down"),
            pool.get(f"http://127.0.0.1:{silent.getsockname()[1]}/", {}),
        ):
            pass
