"""Files that somebody found to be wrong while reading them: the scrub looks at them before anything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from bdn.core.digest import Digest


class Suspects:
    """Contents of the node tier, in the order in which they came under suspicion. Shared by threads.

    ``on_news`` is called in the thread that suspects, for a file that was not suspected before.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._contents: dict[Digest, None] = {}

    def add(self, content: Digest) -> None:
        """Its bytes are not what its name says, as it seems."""
        with self._lock:
            is_new = content not in self._contents
            self._contents[content] = None
        if is_new:
            self.on_news()

    def clear(self, content: Digest) -> None:
        """It was looked at."""
        with self._lock:
            self._contents.pop(content, None)

    def restore(self, contents: Iterable[Digest]) -> None:
        """Those that an earlier run left."""
        with self._lock:
            self._contents |= dict.fromkeys(contents)

    def all(self) -> tuple[Digest, ...]:
        """Who is to be looked at, the first one first."""
        with self._lock:
            return tuple(self._contents)
