"""What grows with the number of manifests, files, chunks and agents: CPU seconds, memory and counts, with nothing around them.

CPU seconds are those of this thread, so that what else the machine does is not counted.
"""

import asyncio
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from bdn.core.cache.index import CacheIndex, Steps
from bdn.core.chunk import CHUNK_SIZE, FileLayout
from bench import agent_memory, collected, documents, many_agents, opened_objects, published
from bench.report import Figure, scaled
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.cache.held_chunks import HeldChunks
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from tests.support.agent.cache import a_tier, a_tier_of_chunks, at_once
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.ring import Ring
from tests.support.content.layouts import held_of
from tests.support.content.names import named


def measure() -> list[Figure]:
    """All sections, in their order."""
    return [figure for section in SECTIONS.values() for figure in section()]


def plans() -> Sequence[Figure]:
    """An eviction of everything, as the agent's event loop carries it out."""
    index, manifests = CacheIndex(), scaled(10_000)
    shared = dict.fromkeys(map(named, "abc"), 1000)
    for number in range(manifests):
        contents = shared | {named(f"{number} {file}"): 1000 for file in range(97)}
        index.restore(named(f"manifest {number}"), contents, dict.fromkeys(contents, True), last_used=number)
    turns: list[float] = []

    def run(steps: Steps[object]) -> None:
        began = time.thread_time()
        for _ in steps:
            turns.append(1000 * (time.thread_time() - began))
            began = time.thread_time()
        turns.append(1000 * (time.thread_time() - began))

    plan = at_once(index.planning(size=10**15))
    run(index.planning(size=10**15))
    run(index.evicting(plan.victims))
    what = f"{manifests} manifests of 100 files, planned and evicted"
    return [
        Figure(f"{what}: longest turn of the event loop", "ms CPU", (max(turns),), "<= 50"),
        Figure(f"{what}: all turns", "s CPU", (sum(turns) / 1000,)),
    ]


def chunks() -> Sequence[Figure]:
    """What an agent keeps in memory for each chunk: of files that it can serve, and of chunks that it holds for peers."""
    count = scaled(200_000)
    tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder:
        held = HeldChunks(WholeFiles(Places(Path(folder))), CacheIndex(), a_tier(Path(folder)), lambda _: None)
        in_files = _allocated(lambda: _hold_files(held, count)) / count
    held_for_peers: list[ClusterTier] = []
    for_peers = _allocated(lambda: held_for_peers.append(_hold_chunks(count))) / count
    tracemalloc.stop()
    return [
        Figure(f"{count} chunks of files of 1000: memory per chunk", "bytes", (in_files,), "<= 120"),
        Figure(f"{count} chunks for peers: memory per chunk", "bytes", (for_peers,), "<= 120"),
    ]


def _allocated(work: Callable[[], None]) -> int:
    before, _ = tracemalloc.get_traced_memory()
    work()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def _hold_files(held: HeldChunks, count: int) -> None:
    layouts = [
        FileLayout.of(1000 * CHUNK_SIZE, tuple(named(f"{file} {index}") for index in range(1000)))
        for file in range(count // 1000)
    ]
    held.add(held_of({str(number): one for number, one in enumerate(layouts)}))


def _hold_chunks(count: int) -> ClusterTier:
    return a_tier_of_chunks(named("manifest"), {named(str(number)): CHUNK_SIZE - number for number in range(count)})


def asked() -> Sequence[Figure]:
    """What a mirror is asked for, besides chunks, by a cold cluster that stages one manifest of small files at once."""
    agents, files = 20, scaled(500)
    with AgentMirror(is_packed=True).running() as mirror, tempfile.TemporaryDirectory() as folder:
        manifest = mirror.publish({f"{number % 100}/{number}": f"{number}".encode() for number in range(files)})

        async def stage() -> None:
            ring = Ring(mirror, Path(folder))
            async with ring.nodes(agents, byte_threads=2):
                mirror.forget()
                await ring.staged_by_all(manifest)

        asyncio.run(stage())
        requests = dict(mirror.documents)
        tree = mirror.trees[manifest.digest]
        sizes = {f"/manifests/{manifest.digest}": len(tree.root.content)}
        sizes |= {f"/chunks/{page.digest}": page.size for page in tree.root.pages}
    what = f"{agents} agents stage {files} files: documents of the mirror"
    return [
        Figure(f"{what}: requests", "requests", (sum(requests.values()),)),
        Figure(f"{what}: sent", "MB", (sum(count * sizes[path] for path, count in requests.items()) / 1e6,)),
    ]


SECTIONS: dict[str, Callable[[], Sequence[Figure]]] = {
    "plans": plans,
    "chunks": chunks,
    "documents": documents.measure,
    "asked": asked,
    "opened": opened_objects.measure,
    "collected": collected.measure,
    "published": published.measure,
    "agents": many_agents.measure,
    "agent": agent_memory.measure,
}
