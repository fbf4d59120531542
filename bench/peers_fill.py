"""How fast others bring the same files to the same disk."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import disk, nginx, peers
from bench.fill import FILES, SIZE
from bench.mirrored import PREFIX, ColdStages, Mirrored, mirrored
from bench.report import FEW_RUNS, RUNS, Figure, Missing, Row, ratios, scaled_size

ASKED = {
    peers.TRUSS_TRANSFER: ">= 3",
    peers.S5CMD: ">= 2.5",
    peers.ARIA2C: ">= 3.5",
    peers.HF_TRANSFER: "",
    peers.RCLONE: "",
}


@dataclass(frozen=True)
class Offer:
    """What peers are asked for: all below a prefix of a server, into a folder below ``root``.

    ``keep`` makes the server read it from the page cache; ``check`` looks at what came, and on demand at every byte.
    """

    origin: nginx.Origin
    prefix: str
    gigabytes: float
    root: Path
    keep: Callable[[], object]
    check: Callable[[Path, bool], object]

    @classmethod
    def of(cls, content: Mirrored) -> "Offer":
        """The files that were mirrored, where the mirror had them from."""
        source = content.source
        return cls(
            content.origin,
            PREFIX,
            content.gigabytes,
            content.root,
            lambda: disk.keep(disk.files_below(source)),
            lambda target, is_all: peers.check(source, target, content=is_all),
        )


@dataclass
class Beside:
    """A peer, and what it achieved so far. One that is missing, or fails once, is not asked again."""

    peer: peers.Peer
    asked: str = ""
    title: str = ""  # before its name
    rates: list[float] = field(default_factory=list)
    missing: Missing | None = None

    def __post_init__(self) -> None:
        if reason := self.peer.missing():
            self.missing = Missing(self._name, reason, self.asked)

    def run(self, offer: Offer, run: int) -> None:
        if self.missing or (run >= FEW_RUNS and not self.asked):
            return
        offer.keep()
        target = offer.root / "others"
        try:
            self.rates.append(offer.gigabytes / self.peer.fetch(offer.origin, offer.prefix, target))
            offer.check(target, run == 0)
        except Exception as error:
            self.missing = Missing(self._name, str(error), self.asked, has_failed=True)
        shutil.rmtree(target)
        os.sync()

    def rows(self, ours: list[float]) -> list[Row]:
        if self.missing:
            return [self.missing]
        pairs = ratios(ours[: len(self.rates)], self.rates)
        return [
            Figure(self._name, "GB/s", self.rates),
            Figure(f"{self.title}ratio to {self.peer.name}, pair by pair", "x", pairs, self.asked),
        ]

    @property
    def _name(self) -> str:
        return f"{self.title}{self.peer.name}"


def measure() -> list[Row]:
    """Ours and each of the others, in turn."""
    beside = [Beside(peer, asked) for peer, asked in ASKED.items()]
    with mirrored(FILES, scaled_size(SIZE)) as content, content.agent("agent") as agent:
        ours = ColdStages(content, agent)
        for run in range(RUNS):
            ours.run()
            disk.drop(disk.files_below(content.mirror.store))  # leave the memory to the others
            for one in beside:
                one.run(Offer.of(content), run)
    title = f"{FILES} x {content.size // 1024**2} MiB"
    rows: list[Row] = [Figure(f"{title}: cold stage", "GB/s", ours.rates)]
    return rows + [row for one in beside for row in one.rows(ours.rates)]
