"""``python -m bench [NAME…]``: measure, print, and write docs/benchmarks.md, which says what each one is.

Exit status 1: something failed.
"""

import sys
import time
import traceback
from collections.abc import Callable, Sequence

from bench import (
    alone,
    cache_summary,
    checkpoints,
    direct,
    fill,
    gateway,
    kubernetes,
    listings,
    memory,
    page,
    peers_fill,
    pull_again,
    receiver,
    report,
    ring,
    scale,
    scratch,
    simulation,
    small,
    throughput,
    tls,
    training,
    warm_cache,
    warm_stage,
    watchers,
)
from bench.report import Missing, Row

# In a fair order: ext4 makes new files up to four times more slowly for minutes after it has deleted very many. So large
# files come first, and between two that make many there are minutes of something else.
BENCHMARKS: dict[str, Callable[[], Sequence[Row]]] = {
    "fill": fill.measure,
    "fill-capped": fill.measure_capped,
    "peers": peers_fill.measure,
    "direct": direct.measure,
    "sink": alone.measure_sink,
    "chunk-server": alone.measure_chunk_server,
    "receiver": receiver.measure,
    "checkpoints": checkpoints.measure,
    "scratch": scratch.measure,
    "tls": tls.measure,
    "gateway": gateway.measure,
    "warm-cache": warm_cache.measure,
    "small": small.measure,
    "ring": ring.measure,
    "simulation": simulation.measure,
    "warm-stage": warm_stage.measure,
    "training": training.measure,
    "pull-again": pull_again.measure,
    "memory": memory.measure,
    "throughput": throughput.measure,
    "listings": listings.measure,
    "cache-directory": cache_summary.measure_directory,
    "cache-summary": cache_summary.measure,
    "scale": scale.measure,
    "watchers": watchers.measure,
    "page": page.measure,
    "kubernetes": kubernetes.measure,
}


def main() -> None:
    """The named ones, or all. One that fails is a row that says so, and the others go on."""
    sections: dict[str, Sequence[Row]] = {}
    for name in sys.argv[1:] or BENCHMARKS:
        began = time.monotonic()
        try:
            sections[name] = BENCHMARKS[name]()
        except Exception as error:
            traceback.print_exc()
            sections[name] = [Missing(name, f"{type(error).__name__}: {error}", has_failed=True)]
        print(report.write(name, sections[name], time.monotonic() - began), flush=True)
    print(report.summary(sections))
    rows = [row for section in sections.values() for row in section]
    sys.exit(any(isinstance(row, Missing) and row.has_failed for row in rows))


if __name__ == "__main__":
    main()
