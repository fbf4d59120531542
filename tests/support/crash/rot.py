"""Disks that rot: what happens to bytes when nobody looks, and what an agent has to show for it afterwards."""

import asyncio
import errno
import io
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest
from bdn.core.layout import Manifest
from bdn.wire.operation_schema import PathVerification, PathVerificationRequest, VerifyCommand, VerifyReport
from node_agent.app import Agent
from tests.fakes.clock import Clock
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, metrics, staged, verified

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


@dataclass
class StagedNode:
    """An agent that has staged one manifest, and what its disk makes of it."""

    agent: Agent
    mirror: AgentMirror
    manifest: Manifest
    clock: Clock
    stage: str
    view: Path  # where the job sees its files

    def cached(self, path: str) -> Path:
        return cached(self.agent, self.manifest, path)

    def flip(self, path: str, offset: int = 5) -> None:
        flip(self.cached(path), offset)

    def chunks(self, path: str) -> list[Digest]:
        return self.mirror.chunks(self.manifest, path)

    def is_complete(self) -> bool:
        return self.agent.cache.index.is_complete(self.manifest.digest)

    async def a_week_later(self) -> None:
        """The scrub's round that begins then is over; ``mirror`` counts what it cost."""
        self.mirror.forget()
        await self.agent.scrub.catch_up()  # what was under way
        self.clock.now += WEEK
        await self.agent.scrub.catch_up()

    async def counted(self, outcome: str = "repaired", tier: str = "node") -> float:
        """How many damaged chunks the metrics count."""
        figures = await self.figures()
        return figures.get(f'bdn_agent_damaged_chunks_total{{outcome="{outcome}",tier="{tier}"}}', 0)

    async def figures(self) -> dict[str, float]:
        return metrics(self.agent.metrics.render(await self.agent.holdings.tiers()).decode())

    async def until_repaired(self) -> None:
        async with asyncio.timeout(60):
            while await self.counted() < 1:  # noqa: ASYNC110 - it is told to the loop that runs in the agent
                await asyncio.sleep(0.01)

    async def verify(self, **command: Any) -> VerifyReport:
        return await verified(self.agent, VerifyCommand(id="ver_1", **command))

    async def look(self, path: Path | str, *, repair: bool = True) -> PathVerification:
        """What an operator on the node hears about a path."""
        return await self.agent.verifications.look_at(PathVerificationRequest(path=str(path), repair=repair))

    def evidence(self) -> list[dict[str, object]]:
        """What the quarantine says."""
        return [json.loads(path.read_bytes()) for path in sorted(self.agent.places.quarantine.glob("*.json"))]


@asynccontextmanager
async def staged_node(rig: Rig, files: dict[str, bytes], **changes: Any) -> AsyncIterator[StagedNode]:
    """The agent runs until the block ends."""
    manifest, clock = rig.mirror.publish(files), now()
    async with rig.agent(clock, **changes) as agent:
        stage = await staged(agent, rig.mirror, manifest)
        rig.mirror.forget()
        yield StagedNode(agent, rig.mirror, manifest, clock, stage.id, Path(stage.mounts[0].path))


@contextmanager
def not_permitted(files: set[Path], *, also_moving: bool = False) -> Iterator[None]:
    """To open what stands there now fails with EACCES, also for root; what takes its place may be read.

    With ``also_moving`` nothing can take its place, either: it can be neither renamed nor replaced nor touched.
    """
    inodes = {(path.stat().st_dev, path.stat().st_ino) for path in files}

    def guarded(real: Any) -> Any:
        def opens(*given: Any, **named: Any) -> Any:
            # The second is what would be replaced.
            for path in [one for one in given[:2] if isinstance(one, str | bytes | os.PathLike)]:
                place = Path(os.fsdecode(path))
                if place.is_file():
                    found = place.stat()
                    if (found.st_dev, found.st_ino) in inodes:
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(*given, **named)

        return opens

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", guarded(os.open))
        patched.setattr(io, "open", guarded(io.open))
        if also_moving:
            for name in ("rename", "replace", "utime", "unlink"):
                patched.setattr(os, name, guarded(getattr(os, name)))
        yield
