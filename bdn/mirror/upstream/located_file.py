"""A file of an open source, and where it can be read just now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import chunk_count
from bdn.core.pace.retry import Allowance
from bdn.core.ports import Location, Locator
from bdn.core.source.upstream import UpstreamFile
from bdn.mirror.upstream.retries import Patience

_MARGIN_SECONDS: Final = 60.0  # a range that is asked for now is still being sent then


@dataclass
class LocatedFile:
    """Its location is asked for once, and again when the upstream refuses it or when it is about to expire."""

    name: str  # the source, for messages
    source: Locator
    file: UpstreamFile
    patience: Patience
    clock: Callable[[], float] = time.time
    allowance: Allowance = field(init=False)  # failures that are forgiven, over all its requests
    _location: Location | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.allowance = Allowance.of(chunk_count(self.file.size))

    @property
    def subject(self) -> str:
        """What it is, for messages."""
        return f"{self.file.path!r} of {self.name}"

    async def location(self, refused: Location | None = None) -> Location:
        """Where to read; a fresh one when ``refused`` is still the current one."""
        async with self._lock:
            current = self._location
            if current is None or current is refused or self._is_expiring(current):
                current = self._location = await self.source.locate(self.file)
            return current

    def _is_expiring(self, location: Location) -> bool:
        return location.expires_at is not None and self.clock() + _MARGIN_SECONDS >= location.expires_at
