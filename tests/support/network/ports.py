"""Ports for programs that listen on the same one in each of their lives."""

import random
import socket
from typing import Final

# Below those that Linux gives to whoever connects: such a one may be a client's while its program is being started again.
_LISTENERS: Final = range(10_000, 32_000)
_SYSTEM: Final = random.SystemRandom()  # several test processes look at once


def free_port() -> int:
    """A port of 127.0.0.1 that nobody had a moment ago."""
    while True:
        port = _SYSTEM.choice(_LISTENERS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
