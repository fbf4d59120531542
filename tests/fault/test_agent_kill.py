"""An agent that is killed in the middle of its work."""

import asyncio
import threading
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.wire.stage_schema import StageRequest
from node_agent.fill.part import SYNC_CHUNKS
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.process import Program
from tests.support.agent.rig import disk_bytes
from tests.support.content.trees import tree

CHUNKS = 22
STUCK = 2  # chunks, and slabs, that do not come before the agent is killed


def striped(chunks: int) -> bytes:
    """Chunks that differ, made quickly."""
    return b"".join(index.to_bytes(8, "big") * (CHUNK_SIZE // 8) for index in range(1, chunks + 1))


async def test_a_killed_agent_goes_on_from_its_bitmap_and_with_the_slabs_that_it_had_not_committed(
    tmp_path: Path,
) -> None:
    small = {f"{number:03}.bin": number.to_bytes(4, "big") * 2500 for number in range(120)}
    files = {"weights": striped(CHUNKS), **small}
    with AgentMirror(is_packed=True, slab_size=100_000).running() as mirror:
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_BYTE_THREADS": str(2 * STUCK)})
        manifest = mirror.publish(files)
        slab_of = {path: mirror.chunks(manifest, path)[0] for path in small}
        chunks, slabs = mirror.chunks(manifest, "weights"), list(dict.fromkeys(slab_of.values()))
        gate, last = threading.Event(), {*chunks[-STUCK:], *slabs[-STUCK:]}
        # Every thread waits for one of the last, so that all others have come.
        stuck = mirror.asked(lambda _: mirror.chunk_requests.keys() >= last)
        for chunk in last:
            mirror.faults[chunk] = [held_by(gate)]
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(60):
                await stuck.wait()
                while not any((tmp_path / "cache/files").glob("*/[!.]*")):  # noqa: ASYNC110 - slabs are being committed
                    await asyncio.sleep(0.01)
            await daemon.kill()
        gate.set()
        left = {path.name: path.read_bytes() for path in (tmp_path / "cache/files").glob("*/[!.]*")}
        assert all(digest_of(content).hex == name for name, content in left.items())
        lacking = {slab_of[path] for path, content in small.items() if digest_of(content).hex not in left}
        assert lacking >= last - set(chunks)
        mirror.forget()

        async with program.daemon() as daemon:
            ready = await daemon.client.stage_by_id(stage.id, 60)

            assert (ready.state, ready.error) == ("READY", None)
            assert tree(Path(ready.mounts[0].path)) == files
            assert mirror.chunk_requests.keys() - set(chunks) == lacking
            assert mirror.requests == len(mirror.chunk_requests) <= len(lacking) + STUCK + SYNC_CHUNKS - 1
            assert ready.mounts[0].bytes_from.node >= SYNC_CHUNKS * CHUNK_SIZE + 10_000 * len(left)
            assert disk_bytes(tmp_path / "cache") == manifest.bytes_total
            assert list((tmp_path / "cache/filling").iterdir()) == []
            cache = await daemon.client.cache()
            assert cache.tiers["node"].committed == manifest.bytes_total
            assert [held.held_by for held in cache.manifests] == [["job"]]
