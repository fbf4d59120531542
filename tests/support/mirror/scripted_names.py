"""A resolver that knows the loopback by names of a test's own, forgets them, or falls silent, on command."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from threading import Event, Lock
from typing import Any, Final
from unittest.mock import patch

# What name servers say of a name that does not exist, and when they cannot be asked.
_FAILURES: Final = (
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
)


@dataclass
class Names:
    """``known`` are at 127.0.0.1. The next ``lost`` questions for them, of those that ``chosen`` likes, find no address.

    ``met`` counts them. Other names go to the system's resolver. Who asks for a name in ``silent`` gets no answer before
    ``speak``, and holds his thread until then; ``asked`` counts the questions for each known name.
    """

    known: tuple[str, ...]
    lost: int = 0
    chosen: Callable[[], bool] = lambda: True
    met: int = 0
    silent: tuple[str, ...] = ()
    asked: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._system = socket.getaddrinfo
        self._failures = cycle(_FAILURES)
        self._lock = Lock()
        self._speaks = Event()

    def speak(self) -> None:
        """Answer all who wait, and whoever asks from now on."""
        self._speaks.set()

    @contextmanager
    def resolving(self) -> Iterator[Names]:
        """In the place of the system's, for every client of this process."""
        with patch("socket.getaddrinfo", self._resolve):
            try:
                yield self
            finally:
                self.speak()

    def _resolve(self, host: Any, *given: Any, **named: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in self.known:
            return self._system(host, *given, **named)
        self.asked[name] += 1
        if name in self.silent:
            self._speaks.wait()
        with self._lock:
            if self.lost and self.chosen():
                self.lost -= 1
                self.met += 1
                raise next(self._failures)
        return self._system("127.0.0.1", *given, **named)
