"""Disks that rot: what happens to bytes when nobody looks, and what an agent has to show for it afterwards."""

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest, Manifest
from node_agent.app import Agent
from tests.support.agent.rig import Clock, metrics

WEEK = 7 * 86400.0


def flip(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def zero(path: Path, offset: int, size: int = 4096) -> None:
    """So much, or what there is of it."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(min(size, path.stat().st_size - offset)))


def truncate(path: Path, offset: int) -> None:
    """Everything behind it."""
    with path.open("r+b") as file:
        file.truncate(offset)


DAMAGES: dict[str, Callable[[Path, int], None]] = {"flipped": flip, "zeroed": zero, "truncated": truncate}


def rot(path: Path, how: str) -> None:
    """From now on the file is not what was written. Its inode stays, unless it is gone or cannot be read."""
    if path.exists():
        path.chmod(0o644)
    HOW[how](path)


def _fail(path: Path) -> None:
    """Every read of it is EIO: the first page of a process is never mapped (proc(5))."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


HOW: Final[dict[str, Callable[[Path], None]]] = {
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "truncated": lambda path: truncate(path, path.stat().st_size // 3),
    "zeroed": lambda path: zero(path, 0, path.stat().st_size),
    "absent": Path.unlink,
    "unreadable": _fail,
}


def digest_of_path(manifest: Manifest, path: str) -> Digest:
    return next(entry.digest for entry in manifest.files if entry.path == path)


def cached(agent: Agent, manifest: Manifest, path: str) -> Path:
    """Where the cache has a file of the manifest."""
    return agent.places.file(digest_of_path(manifest, path))


def now() -> Clock:
    """A clock that the test moves, and that grants are good by."""
    return Clock(time.time())


async def a_week_later(agent: Agent, clock: Clock) -> None:
    """The scrub's round that begins then is over."""
    await agent.scrub.catch_up()  # what was under way
    clock.now += WEEK
    await agent.scrub.catch_up()


async def figures(agent: Agent) -> dict[str, float]:
    """The agent's metrics."""
    return metrics(agent.metrics.render(await agent.holdings.tiers()).decode())


def repaired(found: dict[str, float], tier: str = "node", outcome: str = "repaired") -> float:
    """How many chunks the metrics count."""
    return found.get(f'bdn_agent_damaged_chunks_total{{outcome="{outcome}",tier="{tier}"}}', 0)


def evidence(agent: Agent) -> list[dict[str, object]]:
    """What the quarantine says."""
    return [json.loads(path.read_bytes()) for path in sorted(agent.places.quarantine.glob("*.json"))]


@contextmanager
def not_permitted(files: set[Path], *, also_moving: bool = False) -> Iterator[None]:
    """To open what stands there now fails with EACCES, also for root; what takes its place may be read.

    With ``also_moving`` nothing can take its place, either: it can be neither renamed nor replaced nor touched.
    """
    inodes = {(path.stat().st_dev, path.stat().st_ino) for path in files}

    def guarded(real: Any) -> Any:
        def opens(path: Any, *given: Any, **named: Any) -> Any:
            place = Path("" if isinstance(path, int) else os.fsdecode(path))
            if place.is_file():
                found = place.stat()
                if (found.st_dev, found.st_ino) in inodes:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *given, **named)

        return opens

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", guarded(os.open))
        patched.setattr(io, "open", guarded(io.open))
        if also_moving:
            for name in ("rename", "replace", "utime", "unlink"):
                patched.setattr(os, name, guarded(getattr(os, name)))
        yield
