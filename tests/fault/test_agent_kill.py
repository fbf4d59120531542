"""An agent that is killed in the middle of its work loses little and goes on by itself."""

import asyncio
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.wire.stage_schema import StageRequest
from node_agent.disk.group_sync import GroupSync
from node_agent.fill.part import SYNC_CHUNKS
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.process import Program
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.trees import tree

CHUNKS, THREADS = 22, 2


def striped(chunks: int) -> bytes:
    """Chunks that differ, made quickly."""
    return b"".join(index.to_bytes(8, "big") * (CHUNK_SIZE // 8) for index in range(1, chunks + 1))


async def test_a_killed_agent_goes_on_from_its_bitmap(tmp_path: Path) -> None:
    content = striped(CHUNKS)
    with AgentMirror().running() as mirror:
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_BYTE_THREADS": str(THREADS)})
        manifest = mirror.publish({"weights": content, "config.json": b"{}"})
        chunks = mirror.chunks(manifest, "weights")
        gate, stuck, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
        waiting: set[object] = set()

        def note(chunk: object) -> None:
            if chunk in chunks[-THREADS:]:
                waiting.add(chunk)
            if len(waiting) == THREADS:  # everything else has been written: both threads wait for the last chunks
                loop.call_soon_threadsafe(stuck.set)

        mirror.on_request = note
        for chunk in chunks[-THREADS:]:
            mirror.faults[chunk] = [held_by(gate)]
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(60):
                await stuck.wait()
            await daemon.kill()
        gate.set()
        mirror.forget()

        async with program.daemon() as daemon:
            ready = await daemon.client.stage_by_id(stage.id, 60)

            assert (ready.state, ready.error) == ("READY", None)
            place = Path(ready.mounts[0].path)
            assert (place / "weights").read_bytes() == content
            assert (place / "config.json").read_bytes() == b"{}"
            assert mirror.requests == sum(mirror.chunk_requests[chunk] for chunk in chunks)
            assert mirror.requests <= THREADS + SYNC_CHUNKS - 1
            assert ready.mounts[0].bytes_from.node >= SYNC_CHUNKS * CHUNK_SIZE
            assert disk_bytes(tmp_path / "cache") == manifest.bytes_total
            cache = await daemon.client.cache()
            assert cache.tiers["node"].committed == manifest.bytes_total
            assert [held.held_by for held in cache.manifests] == [["job"]]


async def test_an_agent_that_is_killed_in_the_middle_of_filling_slabs_goes_on_with_the_others(tmp_path: Path) -> None:
    files = {f"{number:03}.bin": number.to_bytes(4, "big") * 2500 for number in range(120)}
    with AgentMirror(is_packed=True, slab_size=100_000).running() as mirror:
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_BYTE_THREADS": str(THREADS)})
        manifest = mirror.publish(files)
        slabs = list(dict.fromkeys(mirror.chunks(manifest, path)[0] for path in files))
        gate, stuck, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
        waiting: list[object] = []

        def note(_: object) -> None:
            waiting.append(None)
            if len(waiting) == 6 + THREADS:  # the threads that brought six slabs wait for two more
                loop.call_soon_threadsafe(stuck.set)

        mirror.on_request = note
        for slab in slabs:
            mirror.faults[slab] = [held_by(gate)]
        for slab in slabs[:6]:
            mirror.faults[slab] = []
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(60):
                await stuck.wait()
                # The slabs that came are being committed meanwhile.
                while not any((tmp_path / "cache/files").glob("*/[!.]*")):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await daemon.kill()
        gate.set()
        left = {path.name: path.read_bytes() for path in (tmp_path / "cache/files").glob("*/[!.]*")}
        assert all(digest_of(content).hex == name for name, content in left.items())
        lacking = [path for path, content in files.items() if digest_of(content).hex not in left]
        mirror.faults.clear()
        mirror.forget()

        async with program.daemon() as daemon:
            ready = await daemon.client.stage_by_id(stage.id, 60)

            assert (ready.state, ready.error) == ("READY", None)
            assert tree(Path(ready.mounts[0].path)) == files
            assert mirror.chunk_requests.keys() == {mirror.chunks(manifest, path)[0] for path in lacking}
            assert mirror.requests == len(mirror.chunk_requests)
            assert ready.mounts[0].bytes_from.node == 10_000 * len(left)
            assert disk_bytes(tmp_path / "cache") == manifest.bytes_total
            assert list((tmp_path / "cache/filling").iterdir()) == []


async def test_whatever_moment_an_agent_is_killed_at_every_file_under_its_name_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache directory is copied at every step of a slab, and an agent is started on each copy."""
    files = {f"{number:03}.bin": number.to_bytes(4, "big") * 25 for number in range(12)}
    moments: list[Path] = []
    rename, sync = os.rename, GroupSync.sync

    def snapshot() -> None:
        moments.append(tmp_path / f"moment-{len(moments)}")
        shutil.copytree(tmp_path / "node/cache", moments[-1] / "cache", symlinks=True)

    def rename_slowly(name: str | Path, target: str | Path, **folders: int) -> None:
        if isinstance(name, str) and "/." in name and folders:
            snapshot()
        rename(name, target, **folders)

    async def sync_slowly(self: GroupSync, paths: Sequence[str], mark: int) -> None:
        snapshot()
        await sync(self, paths, mark)
        snapshot()

    with AgentMirror(is_packed=True).running() as mirror:
        manifest = mirror.publish(files)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename_slowly)
            patch.setattr(GroupSync, "sync", sync_slowly)
            async with Rig(mirror, tmp_path / "node").agent() as agent:
                await staged(agent, mirror, manifest)
        assert len(moments) == 4 + len(files)
        for moment in moments:
            whole = {
                path.name: path.read_bytes()
                for path in (moment / "cache/files").rglob("*")
                if path.is_file() and not path.name.startswith(".")
            }
            assert all(digest_of(content).hex == name for name, content in whole.items())
            async with Rig(mirror, moment).agent() as agent:
                stage = await staged(agent, mirror, manifest, job="another")
                assert tree(Path(stage.mounts[0].path)) == files
                ledger = agent.cache.index.ledger
                assert (ledger.used_bytes, ledger.reserved_bytes) == (disk_bytes(moment / "cache"), 0)
