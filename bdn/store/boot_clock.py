"""A clock for deadlines of requests to the store."""

import time


def since_boot() -> float:
    """Seconds of a clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
