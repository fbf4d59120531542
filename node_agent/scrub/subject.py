"""What is read again, and what was found wrong about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bdn.core.digest import Digest
from bdn.core.store.layout import FileLayout, PlacedChunk
from bdn.wire.eviction_schema import Tier


@dataclass(frozen=True)
class Subject:
    """A content, and where its bytes lie. ``shown`` is what people call it, where that is not its path in the manifest."""

    path: Path
    content: Digest
    manifest: Digest
    tier: Tier = "node"
    shown: str | None = None


@dataclass(frozen=True)
class Wrong:
    """One chunk that is not what its name says, or, without a chunk, something about the whole file.

    ``found`` is None when it is unreadable; ``is_of_the_disk`` when the disk did not take the right bytes, either.
    """

    reason: str
    chunk: PlacedChunk | None = None
    found: Digest | None = None
    is_of_the_disk: bool = False


def plain(content: Digest, size: int) -> FileLayout:
    """The layout of what is at most one chunk: its name is that of its bytes."""
    return FileLayout(content, size, (content,) if size else ())
