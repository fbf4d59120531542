"""How much of a disk's rate an agent's fill is, for disks of several rates: which disk is the limit, and not the code."""

from collections.abc import Sequence

from tests.benchmarks import capped_disk, fio
from tests.benchmarks.cold_stages import ColdStages
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size

INTRODUCTION = """
The cold stage of *fill* in turn with *fio*, on the same disk made slower by cgroup's block controller. Where the disk is slower than what two
CPUs carry through two processes and TCP, the disk is the limit; *fill* shows how far this machine gets when its disk is faster.
"""
FILES, SIZE, IN_FLIGHT = 4, 2 * 1024**3, 8
CAPS = (1.2, 1.6, 2.0, 2.4)  # GB/s


def measure() -> Sequence[Row]:
    """The agent and the disk in turn, at each rate."""
    if why := fio.missing() or capped_disk.missing():
        return [Missing("fill of a disk that is capped", why)]
    rows: list[Row] = []
    with (
        mirrored(FILES, scaled_size(SIZE)) as content,
        capped_disk.capped_disk(content.root) as disk,
        content.agent("capped") as agent,
    ):
        disk.take(agent.process.pid)
        for cap in CAPS:
            disk.cap(cap)
            ours, theirs = ColdStages(content, agent, checked=cap != CAPS[0]), list[float]()
            for _ in range(RUNS):
                ours.run()
                theirs.append(fio.write(content.root, content.files, content.size, IN_FLIGHT, disk.within))
            rows += [
                Figure(f"a disk of {cap} GB/s: cold stage", "GB/s", tuple(ours.rates)),
                Figure(f"a disk of {cap} GB/s: fio's direct write", "GB/s", tuple(theirs)),
                Figure(f"a disk of {cap} GB/s: ratio, pair by pair", "x", ratios(ours.rates, theirs), ">= 0.90"),
            ]
    return rows
