"""How fast an agent fills its disk from the mirror, beside the disk itself, and what verification costs of that."""

from tests.benchmarks import fio
from tests.benchmarks.cold_stages import ColdStages
from tests.benchmarks.mirrored import mirrored
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import RUNS, scaled_size

INTRODUCTION = """
A cold stage of 4 files of 2 GiB: `bdn-node-agent` fills its cache from the data plane of `bdn serve`. Every chunk is verified by BLAKE3,
every file synced and renamed into place, the view built; the time is the agent's own, from the request to READY. In turn with the same agent
without hashing (*unverified*, no option of the agent), and with *fio*: direct sequential writes of files of the same size, 8 blocks of 8 MiB at any
time, with fsync. Both programs run with their defaults; the mirror's chunks are in the page cache. *verification* is what hashing adds to
the time. CPU and memory (`VmHWM`) are the agent's. Between runs everything is evicted and synced, and the disk is left alone until it is
quiet. The first run of each agent is compared with the source.
"""
FILES, SIZE, IN_FLIGHT = 4, 2 * 1024**3, 8


def measure() -> list[Row]:
    """The agent with and without verification, and the disk, in turn."""
    disk: list[float] = []
    with (
        mirrored(FILES, scaled_size(SIZE)) as content,
        content.agent("verifying") as verifying,
        content.agent("believing", "believing") as believing,
    ):
        ours, unverified = ColdStages(content, verifying), ColdStages(content, believing)
        for _ in range(RUNS):
            ours.run()
            if not fio.missing():
                disk.append(fio.write(content.root, content.files, content.size, IN_FLIGHT))
            unverified.run()
        peak = verifying.peak_megabytes
    title = f"{FILES} x {content.size // 1024**2} MiB"
    slower = tuple(100 * (ratio - 1) for ratio in ratios(unverified.rates, ours.rates))
    return [
        Figure(f"{title}: cold stage", "GB/s", tuple(ours.rates)),
        *_beside_the_disk(title, ours.rates, disk),
        Figure(f"{title}: CPU of the agent", "s/GB", tuple(ours.cpu), "<= 0.8"),
        Figure(f"{title}: memory of the agent", "MB", (peak,), "<= 1074"),
        Figure(f"{title}: unverified", "GB/s", tuple(unverified.rates)),
        Figure(f"{title}: CPU of the agent, unverified", "s/GB", tuple(unverified.cpu)),
        Figure(f"{title}: verification, pair by pair", "%", slower, "<= 10"),
    ]


def _beside_the_disk(title: str, ours: list[float], disk: list[float]) -> list[Row]:
    if not disk:
        return [Missing(f"{title}: fio's direct write", fio.missing(), ">= 0.90")]
    return [
        Figure(f"{title}: fio's direct write", "GB/s", tuple(disk)),
        Figure(f"{title}: ratio to fio, pair by pair", "x", ratios(ours, disk), ">= 0.90"),
    ]
