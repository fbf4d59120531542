"""``python -m tests.benchmarks [NAME…]``: measure, print, and write docs/benchmarks.md. Exit status 1: something failed."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence

from tests.benchmarks import (
    chunk_server,
    fill,
    fill_capped,
    kill,
    listings,
    memory,
    peers_fill,
    pull_again,
    report,
    ring,
    simulation,
    sink,
    small,
    throughput,
    warm_cache,
    warm_stage,
)
from tests.benchmarks.report import Missing, Row

# In a fair order: ext4 makes new files up to four times more slowly for minutes after it has deleted very many. So large
# files come first, and between two that make many there are minutes of something else.
BENCHMARKS: dict[str, tuple[str, Callable[[], Sequence[Row]]]] = {
    "fill": (fill.INTRODUCTION, fill.measure),
    "fill-capped": (fill_capped.INTRODUCTION, fill_capped.measure),
    "peers": (peers_fill.INTRODUCTION, peers_fill.measure),
    "sink": (sink.INTRODUCTION, sink.measure),
    "chunk-server": (chunk_server.INTRODUCTION, chunk_server.measure),
    "warm-cache": (warm_cache.INTRODUCTION, warm_cache.measure),
    "kill": (kill.INTRODUCTION, kill.measure),
    "small": (small.INTRODUCTION, small.measure),
    "ring": (ring.INTRODUCTION, ring.measure),
    "simulation": (simulation.INTRODUCTION, simulation.measure),
    "warm-stage": (warm_stage.INTRODUCTION, warm_stage.measure),
    "pull-again": (pull_again.INTRODUCTION, pull_again.measure),
    "memory": (memory.INTRODUCTION, memory.measure),
    "throughput": (throughput.INTRODUCTION, throughput.measure),
    "listings": (listings.INTRODUCTION, listings.measure),
}


def main() -> None:
    """The named ones, or all. One that fails is a row that says so, and the others go on."""
    sections: dict[str, Sequence[Row]] = {}
    for name in sys.argv[1:] or BENCHMARKS:
        introduction, measure = BENCHMARKS[name]
        began = time.monotonic()
        try:
            sections[name] = measure()
        except Exception as error:
            traceback.print_exc()
            sections[name] = [Missing(name, f"{type(error).__name__}: {error}", has_failed=True)]
        seconds = time.monotonic() - began
        print(report.write(name, introduction, sections[name], seconds, BENCHMARKS), flush=True)
    print(report.summary(sections))
    rows = [row for section in sections.values() for row in section]
    sys.exit(any(isinstance(row, Missing) and row.has_failed for row in rows))


if __name__ == "__main__":
    main()
