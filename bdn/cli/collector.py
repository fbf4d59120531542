"""Python's garbage collector in programs that hold millions of objects."""

import gc
from typing import Final

_NEW_OBJECTS: Final = 100_000  # between two runs of the garbage collector; Python's default is 700


def spare_collector() -> None:
    """Run Python's garbage collector less often. Call once everything is imported.

    A listing of a million files is millions of objects, none of them in a cycle. By default the collector scans them
    again and again as they are made: a quarter of the CPU time of mirroring 20,000 small files (docs/benchmarks.md).
    Imported modules are permanent and never scanned.
    """
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 50, 100)
