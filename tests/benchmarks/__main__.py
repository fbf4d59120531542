"""``python -m tests.benchmarks [NAME…]``: measure, print, and write docs/benchmarks.md."""

from __future__ import annotations

import sys

from tests.benchmarks import fill, listings, memory, pull_again, report, throughput

BENCHMARKS = {
    "pull-again": (pull_again.INTRODUCTION, pull_again.measure),
    "fill": (fill.INTRODUCTION, fill.measure),
    "throughput": (throughput.INTRODUCTION, throughput.measure),
    "memory": (memory.INTRODUCTION, memory.measure),
    "listings": (listings.INTRODUCTION, listings.measure),
}


def main() -> None:
    """The named ones, or all."""
    for name in sys.argv[1:] or BENCHMARKS:
        introduction, measure = BENCHMARKS[name]
        print(report.write(name, introduction, measure()), flush=True)


if __name__ == "__main__":
    main()
