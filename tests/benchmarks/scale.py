"""What grows with the number of manifests, files, chunks and agents: CPU seconds, memory and counts, with nothing around them.

CPU seconds are those of this thread, so that what else the machine does is not counted.
"""

import time
from collections.abc import Callable, Sequence

from bdn.core.cache.index import CacheIndex, Steps
from tests.benchmarks.report import Figure, scaled
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

    plan = index.plan_lru(10**15)
    run(index.planning(size=10**15))
    run(index.evicting(plan.victims))
    what = f"{manifests} manifests of 100 files, planned and evicted"
    return [
        Figure(f"{what}: longest turn of the event loop", "ms CPU", (max(turns),), "<= 50"),
        Figure(f"{what}: all turns", "s CPU", (sum(turns) / 1000,)),
    ]


SECTIONS: dict[str, Callable[[], Sequence[Figure]]] = {"plans": plans}
