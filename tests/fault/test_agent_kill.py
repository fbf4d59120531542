"""An agent that is killed in the middle of its work loses little and goes on by itself."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bdn.wire.stage_schema import StageRequest
from node_agent.fill.part import SYNC_CHUNKS
from tests.support.agent_mirror import AgentMirror, held_by
from tests.support.agent_process import Program
from tests.support.agent_rig import disk_bytes

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
