"""How large a benchmark is: all sizes and counts are written for 1."""

import os
from typing import Final

from bdn.core.chunk import CHUNK_SIZE

SCALE: Final = float(os.environ.get("BDN_BENCH_SCALE", "1"))
RUNS: Final = int(os.environ.get("BDN_BENCH_RUNS", "5"))
FEW_RUNS: Final = min(RUNS, 3)  # of what is long, and not what the page is about


def scaled(count: int) -> int:
    """So many files, stages or the like; at least one."""
    return max(1, int(count * SCALE))


def scaled_size(size: int) -> int:
    """So many bytes, in whole chunks; at least four."""
    return max(4, int(size * SCALE) // CHUNK_SIZE) * CHUNK_SIZE
