"""Hundreds may ask the same at once: one looks for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bdn.mirror.shared_look import SharedLook

_Seen = TypeVar("_Seen")
_Key = TypeVar("_Key")


@dataclass
class _Wanted(Generic[_Seen]):
    look: SharedLook[_Seen]
    askers: int = 0


@dataclass(frozen=True)
class SharedLooks(Generic[_Key, _Seen]):
    """One shared look for each question, for as long as somebody asks it. ``seconds`` as of ``SharedLook``."""

    seconds: float
    _wanted: dict[_Key, _Wanted[_Seen]] = field(default_factory=dict)

    @contextmanager
    def of(self, key: _Key, look: Callable[[], Awaitable[_Seen]]) -> Iterator[SharedLook[_Seen]]:
        """The look that all who ask the same share, until the block ends. Equal keys have looks that do the same."""
        wanted = self._wanted.setdefault(key, _Wanted(SharedLook(look, self.seconds)))
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
