"""Figures as they stand in docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.scale import SCALE

PAGE = Path(__file__).parents[2] / "docs/benchmarks.md"


@dataclass(frozen=True)
class Figure:
    """One measured thing: several values of one unit, and what was asked of it (empty where nothing was)."""

    what: str
    unit: str
    values: tuple[float, ...]
    asked: str = ""

    def row(self) -> str:
        """Minimum, median and maximum, as a row of a table."""
        low, middle, high = min(self.values), statistics.median(self.values), max(self.values)
        return (
            f"| {self.what} | {middle:.3g} | {low:.3g} - {high:.3g} | {len(self.values)} | {self.unit} | {self.asked} |"
        )


@dataclass(frozen=True)
class Missing:
    """Something that could not be measured here, and why."""

    what: str
    reason: str
    asked: str = ""

    def row(self) -> str:
        """The reason stands where the figures would."""
        return f"| {self.what} | not measured: {self.reason} | | 0 | | {self.asked} |"


Row = Figure | Missing


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, ...]:
    """Pair by pair: what was measured in the same minute is divided by each other."""
    return tuple(a / b for a, b in zip(over, under, strict=True))


def write(name: str, introduction: str, figures: Sequence[Row]) -> str:
    """Replace the section ``name`` of the page, or add it; returns the section."""
    section = "\n".join([f"## {name}", "", introduction.strip(), "", _measured(name), "", *_table(figures), ""])
    page = PAGE.read_text() if PAGE.exists() else HEAD
    before, found, rest = page.partition(f"## {name}\n")
    _, next_heading, after = rest.partition("\n## ")
    page = (
        f"{before}{section}{f'{next_heading}{after}' if next_heading else ''}"
        if found
        else f"{page.rstrip()}\n\n{section}"
    )
    PAGE.write_text(page)
    return section


def _measured(name: str) -> str:
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    scale = "" if SCALE == 1 else f" at the scale {SCALE:g}"
    command = f"`make bench` or `python -m tests.benchmarks {name}`"
    return f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine}{scale}: {command}."


def _table(figures: Sequence[Row]) -> list[str]:
    return [
        "| what | median | range | runs | unit | asked for |",
        "|---|---|---|---|---|---|",
        *(figure.row() for figure in figures),
    ]


HEAD = """# Benchmarks

Ratios travel, absolutes do not: the machines that these figures come from are shared and noisy. Content is verified in every
run and synced before the clock stops. Each section names the command that makes it.
"""
