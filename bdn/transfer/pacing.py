"""A rate limit that threads share: what a data plane sends, whoever asks for it."""

import threading
import time
from collections.abc import Callable
from typing import Final

from bdn.core.pace.rate_limit import TokenBucket

_BURST_SECONDS: Final = 0.25
_LEAST_BURST: Final = 1024 * 1024


class Pacer:
    """How long to wait before so many bytes are sent. Who asks promises to send them then."""

    def __init__(self, rate_bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        burst = max(_LEAST_BURST, int(rate_bytes_per_second * _BURST_SECONDS))
        self._clock = clock
        self._bucket = TokenBucket(rate_bytes_per_second, burst, clock())
        self._lock = threading.Lock()

    def __call__(self, size: int) -> float:
        """Seconds; 0 is now."""
        with self._lock:
            return self._bucket.reserve(size, self._clock())


def pacer(rate_bytes_per_second: int | None) -> Pacer | None:
    """A pacer, or None where no limit was set."""
    return None if rate_bytes_per_second is None else Pacer(rate_bytes_per_second)
