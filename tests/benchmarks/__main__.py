"""``python -m tests.benchmarks [NAME…]``: measure, print, and write docs/benchmarks.md."""

from __future__ import annotations

import sys

from tests.benchmarks import (
    chunk_server,
    fill,
    kill,
    listings,
    memory,
    pull_again,
    report,
    ring,
    small,
    throughput,
    warm_stage,
)

BENCHMARKS = {
    "pull-again": (pull_again.INTRODUCTION, pull_again.measure),
    "fill": (fill.INTRODUCTION, fill.measure),
    "peers": (fill.PEERS_INTRODUCTION, fill.measure_peers),
    "sink": (chunk_server.SINK_INTRODUCTION, chunk_server.measure_sink),
    "chunk-server": (chunk_server.INTRODUCTION, chunk_server.measure),
    "small": (small.INTRODUCTION, small.measure),
    "warm-stage": (warm_stage.INTRODUCTION, warm_stage.measure),
    "kill": (kill.INTRODUCTION, kill.measure),
    "ring": (ring.INTRODUCTION, ring.measure),
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
