"""How large a benchmark is, and its figures as they stand in docs/benchmarks.md."""

import operator
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bdn.core.chunk import CHUNK_SIZE

SCALE: Final = float(os.environ.get("BDN_BENCH_SCALE", "1"))  # all sizes and counts are written for 1
RUNS: Final = int(os.environ.get("BDN_BENCH_RUNS", "5"))
FEW_RUNS: Final = min(RUNS, 3)  # of what is long, and not what the page is about
PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
_BOUND = re.compile(r"(<=|>=|<) ([\d.]+)")
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


def scaled(count: int) -> int:
    """So many files, stages or the like; at least one."""
    return max(1, int(count * SCALE))


def scaled_size(size: int) -> int:
    """So many bytes, in whole chunks; at least four."""
    return max(4, int(size * SCALE) // CHUNK_SIZE) * CHUNK_SIZE


@dataclass(frozen=True)
class Figure:
    """One measured thing: several values of one unit, and what was asked of their median, such as ``>= 0.9`` (or nothing)."""

    what: str
    unit: str
    values: Sequence[float]
    asked: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether the median is not what was asked for."""
        if bound := _BOUND.match(self.asked):
            return not _COMPARE[bound[1]](statistics.median(self.values), float(bound[2]))
        return False

    def row(self) -> str:
        """Minimum, median and maximum, as a row of a table."""
        low, middle, high = min(self.values), statistics.median(self.values), max(self.values)
        asked = f"{self.asked} (**missed**)" if self.is_missed else self.asked
        return f"| {self.what} | {middle:.3g} | {low:.3g} - {high:.3g} | {len(self.values)} | {self.unit} | {asked} |"


@dataclass(frozen=True)
class Missing:
    """Something that could not be measured here, and why. It may be absent, or it may have failed."""

    what: str
    reason: str
    asked: str = ""
    has_failed: bool = False

    def row(self) -> str:
        """The reason stands where the figures would."""
        word = "failed" if self.has_failed else "not measured"
        return f"| {self.what} | {word}: {_in_a_cell(self.reason)} | | 0 | | {self.asked} |"


Row = Figure | Missing


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, ...]:
    """Pair by pair: what was measured in the same minute is divided by each other."""
    return tuple(a / b for a, b in zip(over, under, strict=True))


def differences(more: Sequence[float], less: Sequence[float]) -> tuple[float, ...]:
    """Pair by pair, likewise."""
    return tuple(a - b for a, b in zip(more, less, strict=True))


def write(name: str, rows: Sequence[Row], seconds: float) -> str:
    """Replace the figures of the section ``name`` of the page, which took so many seconds to measure; its words stay.

    A section is written by hand down to a line that begins with ``Not measured`` or ``Measured``. Returns the figures.
    """
    figures = "\n".join([_measured(name, seconds), "", *_table(rows), ""])
    section = re.compile(
        rf"(^## {re.escape(name)}\n(?:(?!^## ).)*?^)(?:M|Not m)easured\b.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL
    )
    page, found = section.subn(lambda match: f"{match[1]}{figures}\n", PAGE.read_text())
    assert found == 1, f"{PAGE} has no section for {name}"
    if SCALE == 1:  # smaller ones are for trying
        PAGE.write_text(page.rstrip() + "\n")
    return f"## {name}\n\n{figures}"


def summary(sections: dict[str, Sequence[Row]]) -> str:
    """One table of all that something was asked of, or that could not be measured."""
    told = [
        f"| {name} {row.row()}"
        for name, rows in sections.items()
        for row in rows
        if row.asked or isinstance(row, Missing)
    ]
    return "\n".join(
        ["| section | what | median | range | runs | unit | asked for |", "|---|---|---|---|---|---|---|", *told]
    )


def _in_a_cell(words: str) -> str:
    return " ".join(words.replace("|", "/").split())[:300]


def _measured(name: str, seconds: float) -> str:
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    scale = "" if SCALE == 1 else f" at the scale {SCALE:g}"
    command = f"`make bench` or `python -m bench {name}`"
    return f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}{scale}, in {seconds:.0f} s: {command}."


def _table(rows: Sequence[Row]) -> list[str]:
    return [
        "| what | median | range | runs | unit | asked for |",
        "|---|---|---|---|---|---|",
        *(row.row() for row in rows),
    ]
