"""How fast others bring the same files to the same disk."""

import os
import shutil
from dataclasses import dataclass, field

from tests.benchmarks import disk, peers
from tests.benchmarks.fill import FILES, SIZE
from tests.benchmarks.mirrored import PREFIX, ColdStages, Mirrored, mirrored
from tests.benchmarks.report import FEW_RUNS, RUNS, Figure, Missing, Row, ratios, scaled_size

ASKED = {
    peers.TRUSS_TRANSFER: ">= 3",
    peers.S5CMD: ">= 2.5",
    peers.ARIA2C: ">= 3.5",
    peers.HF_TRANSFER: "",
    peers.RCLONE: "",
}


@dataclass
class Beside:
    """A peer, and what it achieved so far. One that fails once is not asked again."""

    peer: peers.Peer
    asked: str
    rates: list[float] = field(default_factory=list)
    missing: Missing | None = None

    def run(self, content: Mirrored, run: int) -> None:
        if self.missing or (run >= FEW_RUNS and not self.asked):
            return
        disk.keep(disk.files_below(content.source))
        target = content.root / "others"
        try:
            self.rates.append(content.gigabytes / self.peer.fetch(content.origin, PREFIX, target))
            peers.check(content.source, target, content=run == 0)
        except Exception as error:
            self.missing = Missing(self.peer.name, str(error), self.asked, has_failed=True)
        shutil.rmtree(target)
        os.sync()

    def rows(self, ours: list[float]) -> list[Row]:
        if self.missing:
            return [self.missing]
        return [
            Figure(self.peer.name, "GB/s", self.rates),
            Figure(
                f"ratio to {self.peer.name}, pair by pair", "x", ratios(ours[: len(self.rates)], self.rates), self.asked
            ),
        ]


def measure() -> list[Row]:
    """Ours and each of the others, in turn."""
    beside = [Beside(peer, asked) for peer, asked in ASKED.items()]
    for one in beside:
        if reason := one.peer.missing():
            one.missing = Missing(one.peer.name, reason, one.asked)
    with mirrored(FILES, scaled_size(SIZE)) as content, content.agent("agent") as agent:
        ours = ColdStages(content, agent)
        for run in range(RUNS):
            ours.run()
            disk.drop(disk.files_below(content.mirror.store))  # leave the memory to the others
            for one in beside:
                one.run(content, run)
    title = f"{FILES} x {content.size // 1024**2} MiB"
    rows: list[Row] = [Figure(f"{title}: cold stage", "GB/s", ours.rates)]
    return rows + [row for one in beside for row in one.rows(ours.rates)]
