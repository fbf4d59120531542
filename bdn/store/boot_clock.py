"""A clock for what has to be sent within some time."""

import time


def since_boot() -> float:
    """Seconds of a clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
