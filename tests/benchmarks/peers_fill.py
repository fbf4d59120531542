"""How fast others bring the same files to the same disk."""

import os
import shutil
from dataclasses import dataclass, field

from tests.benchmarks import page_cache, peers
from tests.benchmarks.cold_stages import ColdStages
from tests.benchmarks.fill import FILES, SIZE
from tests.benchmarks.mirrored import PREFIX, Mirrored, mirrored
from tests.benchmarks.report import Figure, Missing, Row, ratios
from tests.benchmarks.scale import FEW_RUNS, RUNS, scaled_size

INTRODUCTION = """
The cold stage of *fill* in turn with other programs, which read the same bytes from nginx (ranges, keep-alive, page cache); `sync -f` of their folder
is counted in, because none of them syncs. None of them compares content with a digest. Settings are their defaults, except: aria2c with 8
connections for each of 4 files and preallocation; hf_transfer as `huggingface_hub` calls it, 4 files at once; rclone with 4 transfers of 4
streams. What they wrote is compared with the source in the first run, and its sizes in each.
"""
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
        page_cache.keep(page_cache.files_below(content.source))
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
            Figure(self.peer.name, "GB/s", tuple(self.rates)),
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
            page_cache.drop(page_cache.files_below(content.mirror.store))  # leave the memory to the others
            for one in beside:
                one.run(content, run)
    title = f"{FILES} x {content.size // 1024**2} MiB"
    rows: list[Row] = [Figure(f"{title}: cold stage", "GB/s", tuple(ours.rates))]
    return rows + [row for one in beside for row in one.rows(ours.rates)]
