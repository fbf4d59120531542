"""Figures as they stand in docs/benchmarks.md."""

import operator
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.scale import SCALE

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"
_SECTION = re.compile(r"^(## (.+?)\n.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BOUND = re.compile(r"(<=|>=|<) ([\d.]+)")
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Figure:
    """One measured thing: several values of one unit, and what was asked of their median, such as ``>= 0.9`` (or nothing)."""

    what: str
    unit: str
    values: tuple[float, ...]
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


def write(name: str, introduction: str, rows: Sequence[Row], seconds: float, order: Iterable[str] = ()) -> str:
    """Replace the section ``name`` of the page, or add it; returns the section, which took so many seconds to measure.

    Sections that ``order`` names stand in that order, before all others.
    """
    section = "\n".join([f"## {name}", "", introduction.strip(), "", _measured(name, seconds), "", *_table(rows), ""])
    found = _SECTION.findall(PAGE.read_text()) if PAGE.exists() else []
    sections = {**{title: text for text, title in found}, name: section}
    sections = {title: sections[title] for title in (*order, *sections) if title in sections}
    if SCALE == 1:  # smaller ones are for trying
        PAGE.write_text("\n".join([HEAD, *(f"{text.rstrip()}\n" for text in sections.values())]))
    return section


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
    command = f"`make bench` or `python -m tests.benchmarks {name}`"
    return f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}{scale}, in {seconds:.0f} s: {command}."


def _table(rows: Sequence[Row]) -> list[str]:
    return [
        "| what | median | range | runs | unit | asked for |",
        "|---|---|---|---|---|---|",
        *(row.row() for row in rows),
    ]


HEAD = """# Benchmarks

`make bench` installs the programs that we compare with, measures everything and writes this page; each section names the command that measures it
alone. The machines are shared and noisy: compare ratios, not absolute figures. What is compared runs in turn, on the same disk, and a ratio is that
of one pair. Our own results are verified and synced before the clock stops. `BDN_BENCH_SCALE=0.1` makes everything smaller and does not write this page;
`BDN_BENCH_RUNS` is the number of pairs (5; 3 for long ones). Files lie below `TMPDIR`, which needs 30 GB on the disk that is measured. `make bench` takes long
and needs root for network namespaces; what cannot be measured on a machine is a row that says so.
"""
