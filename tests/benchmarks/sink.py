"""How fast an agent takes content in when there is no disk in its way."""

from tests.benchmarks import disk, nginx, prototype
from tests.benchmarks.mirrored import ColdStages, mirrored
from tests.benchmarks.report import RUNS, Figure, Row, ratios, scaled_size

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
        chunks = [f"/{path.relative_to(store)}" for path in disk.files_below(store)]
        for _ in range(RUNS):
            ours.run()
            theirs.append(content.gigabytes / prototype.pull(server, chunks, THREADS))
    return [
        Figure("agent without a disk, verified", "GB/s", ours.rates),
        Figure("prototype from nginx", "GB/s", theirs),
        Figure("ratio, pair by pair", "x", ratios(ours.rates, theirs), ">= 0.7"),
        Figure("CPU of the agent", "s/GB", ours.cpu),
    ]
