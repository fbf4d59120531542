"""How fast an agent takes content in when there is no disk in its way."""

from tests.benchmarks import nginx, page_cache, prototype
from tests.benchmarks.cold_stages import ColdStages
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import Figure, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size

INTRODUCTION = """
A cold stage of one file of 4 GiB by an agent that discards what it would write (all else is as it is: grants, BLAKE3, allocation, rename, view), in turn
with the plainest fast client: `http.client`, 4 threads that read into 8 MiB of memory each and verify nothing, from nginx. Both servers have the chunks in
the page cache.
"""
SIZE, THREADS = 4 * 1024**3, 4


def measure() -> list[Row]:
    """The agent beside the prototype."""
    theirs = []
    with (
        mirrored(1, scaled_size(SIZE)) as content,
        nginx.serving(f"root {content.mirror.store};") as server,
        content.agent("discarding", "discarding") as agent,
    ):
        ours = ColdStages(content, agent, checked=True)
        store = content.mirror.store
        chunks = [f"/{path.relative_to(store)}" for path in page_cache.files_below(store)]
        for _ in range(RUNS):
            ours.run()
            theirs.append(content.gigabytes / prototype.pull(server, chunks, THREADS))
    return [
        Figure("agent without a disk, verified", "GB/s", tuple(ours.rates)),
        Figure("prototype from nginx", "GB/s", tuple(theirs)),
        Figure("ratio, pair by pair", "x", ratios(ours.rates, theirs), ">= 0.7"),
        Figure("CPU of the agent", "s/GB", tuple(ours.cpu)),
    ]
