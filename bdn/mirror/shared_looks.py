"""Hundreds may ask the same at once: the database is asked once for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bdn.mirror.shared_look import SharedLook
from bdn.wire.mirror_schema import Mirror

# What a look that nothing new was heard of may be; less than the time between two of one watcher.
_OLD_SECONDS: Final = 0.4

Key = tuple[str, str]  # what is asked, and the organisation that asks: it is a part of what may be seen


@dataclass
class _Wanted:
    look: SharedLook[Mirror]
    askers: int = 0


@dataclass(frozen=True)
class SharedLooks:
    """One shared look at a mirror for each question, for as long as somebody asks it."""

    _wanted: dict[Key, _Wanted] = field(default_factory=dict)

    @contextmanager
    def of(self, key: Key, look: Callable[[], Awaitable[Mirror]]) -> Iterator[SharedLook[Mirror]]:
        """The look that all who ask the same share, until the block ends. Equal keys have looks that do the same."""
        wanted = self._wanted.setdefault(key, _Wanted(SharedLook(look, _OLD_SECONDS)))
        wanted.askers += 1
        try:
            yield wanted.look
        finally:
            wanted.askers -= 1
            if not wanted.askers:
                del self._wanted[key]

    def __len__(self) -> int:
        """How many questions are being asked."""
        return len(self._wanted)
