"""How fast an agent fills its disk from the mirror, beside the disk itself, and what verification costs of that."""

from tests.benchmarks import disk
from tests.benchmarks.mirrored import ColdStages, mirrored
from tests.benchmarks.report import RUNS, Figure, Missing, Row, ratios, scaled_size

FILES, SIZE, IN_FLIGHT = 4, 2 * 1024**3, 8


def measure() -> list[Row]:
    """The agent with and without verification, and the disk, in turn."""
    direct: list[float] = []
    with (
        mirrored(FILES, scaled_size(SIZE)) as content,
        content.agent("verifying") as verifying,
        content.agent("believing", "believing") as believing,
    ):
        ours, unverified = ColdStages(content, verifying), ColdStages(content, believing)
        for _ in range(RUNS):
            ours.run()
            if not disk.missing_fio():
                direct.append(disk.write(content.root, content.files, content.size, IN_FLIGHT))
            unverified.run()
        peak = verifying.peak_megabytes
    title = f"{FILES} x {content.size // 1024**2} MiB"
    beside: list[Row] = [Missing(f"{title}: fio's direct write", disk.missing_fio(), ">= 0.90")]
    if direct:
        beside = [
            Figure(f"{title}: fio's direct write", "GB/s", direct),
            Figure(f"{title}: ratio to fio, pair by pair", "x", ratios(ours.rates, direct), ">= 0.90"),
        ]
    slower = tuple(100 * (ratio - 1) for ratio in ratios(unverified.rates, ours.rates))
    return [
        Figure(f"{title}: cold stage", "GB/s", ours.rates),
        *beside,
        Figure(f"{title}: CPU of the agent", "s/GB", ours.cpu, "<= 0.8"),
        Figure(f"{title}: memory of the agent", "MB", (peak,), "<= 1074"),
        Figure(f"{title}: unverified", "GB/s", unverified.rates),
        Figure(f"{title}: CPU of the agent, unverified", "s/GB", unverified.cpu),
        Figure(f"{title}: verification, pair by pair", "%", slower, "<= 10"),
    ]
