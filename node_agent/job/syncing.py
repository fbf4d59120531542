"""Sync a job's checkpoint directory: look, wait until a checkpoint has settled, push it, and look again before it becomes visible.

It is another process than the training's, and holds nothing of it up. What it knows is in memory, but for what it has pushed: so one that
starts again pushes nothing twice.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.chunk import ByteRange, digest_of
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.checkpoints import (
    INDEX,
    LONGEST_READ,
    LOOSE,
    READ,
    describe,
    place_of,
)
from bdn.core.training.settling import Settling, Stamp, why_incomplete
from bdn.disk.durable import write_durably
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import CheckpointDetails
from node_agent.background_tasks import in_thread
from node_agent.job.pushing import Pusher, SentFile
from node_agent.job.tree import JobDirectory, Tree, open_for_writing

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 30.0
FILES_LIMIT: Final = 1_000_000
_LATEST: Final = 253_402_300_799  # the last second of the year 9999
_AGAIN_SECONDS: Final = 60.0  # after a push that failed


class ChangedError(Exception):
    """A checkpoint is not what was seen before: somebody writes, or it is gone."""


@dataclass(frozen=True)
class Found:
    """A checkpoint as a look found it: its files by their paths in it, and what has to be known to read them."""

    name: str
    files: Mapping[str, Stamp]
    skipped: Sequence[str]

    @property
    def prefix(self) -> str:
        """Where it lies below the directory."""
        return "" if self.name == LOOSE else f"{self.name}/"

    @property
    def fingerprint(self) -> str:
        """Another one once any file is another, has changed, came or went."""
        known = [[path, *stamp] for path, stamp in sorted(self.files.items())]
        return digest_of(json.dumps(known).encode()).hex

    @property
    def newest(self) -> datetime:
        """The time of the newest file; jobs date them as they like, and what no calendar holds is its nearest end."""
        seconds = max(stamp.mtime for stamp in self.files.values()) / 1e9
        return datetime.fromtimestamp(min(max(seconds, 0), _LATEST), UTC)


def checkpoints_in(tree: Tree) -> dict[str, Found]:
    """By name. A folder without files is none."""
    files: dict[str, dict[str, Stamp]] = {}
    for path, stamp in tree.files.items():
        if (place := place_of(path)) is not None:
            files.setdefault(place[0], {})[place[1]] = stamp
    return {
        name: Found(name, found, [f"{path!a}: {why}" for path, why in tree.skipped.items() if _is_of(path, name)])
        for name, found in files.items()
    }


def _is_of(path: str, name: str) -> bool:
    place = place_of(path)
    return place is not None and place[0] == name


@dataclass
class Pushed:
    """Which checkpoints were pushed, as what, in a file that survives whatever ends this process. A file that is wrong says nothing."""

    file: Path
    fingerprints: dict[str, str] = field(default_factory=dict)

    def load(self) -> None:
        """Blocking."""
        try:
            found = json.loads(self.file.read_bytes())
            self.fingerprints = {str(name): str(value) for name, value in found.items()}
        except (OSError, ValueError, AttributeError):
            self.fingerprints = {}

    def add(self, name: str, fingerprint: str) -> None:
        """Blocking."""
        self.fingerprints[name] = fingerprint
        write_durably(self.file, json.dumps(self.fingerprints, sort_keys=True).encode())


@dataclass
class Syncer:
    """Pushes the checkpoints below a directory as ``job``'s, which names a project, a job and a rank.

    ``on_pushed`` is told of each. ``clock`` never jumps.
    """

    directory: JobDirectory
    job: CheckpointUri
    pusher: Pusher
    pushed: Pushed
    on_pushed: Callable[[Found, Mirror], object]
    settle_seconds: float = SETTLE_SECONDS
    clock: Callable[[], float] = time.monotonic
    _settling: Settling = field(init=False)
    _again_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settling = Settling(self.settle_seconds)

    async def run(self) -> None:
        """For ever. A push that fails is tried again after a minute, and holds up no other checkpoint."""
        await in_thread(self.pushed.load)
        while True:
            for found in await self._settled():
                try:
                    await self._push(found)
                except ChangedError:
                    continue  # somebody writes after all
                except BdnError as error:
                    self._again_at[found.name] = self.clock() + _AGAIN_SECONDS
                    facts = {"checkpoint": found.name, "code": error.code, "error": str(error)}
                    logger.warning("a checkpoint was not pushed, and is tried again", extra=facts)
            await asyncio.sleep(LOOK_SECONDS)

    async def run_once(self) -> list[str]:
        """Push all that is complete as it lies there. Returns the names of those that are not."""
        await in_thread(self.pushed.load)
        left: list[str] = []
        for name, found in checkpoints_in(await in_thread(self.directory.look)).items():
            try:
                if await in_thread(self._is_complete, found):
                    await self._push(found)
                    continue
            except ChangedError:
                pass
            left.append(name)
        return left

    async def _settled(self) -> list[Found]:
        """Those that have settled and were not pushed as they are."""
        tree = await in_thread(self.directory.look)
        now, known = self.clock(), checkpoints_in(tree)
        self._settling.look(now, {name: found.files for name, found in known.items()}, tree.folders)
        return [
            found
            for name, found in known.items()
            if self._settling.is_settled(name, now)
            and self._again_at.get(name, now) <= now
            and self.pushed.fingerprints.get(name) != found.fingerprint
            and await in_thread(self._is_complete, found)
        ]

    def _is_complete(self, found: Found) -> bool:
        """Whether nothing says that more will come: an open file, a shard that an index names, the job itself. Blocking."""
        indexes = {path: self._small(found, path, stamp) for path, stamp in found.files.items() if path.endswith(INDEX)}
        if why_incomplete(found.files, indexes) is not None:
            return False
        writing = open_for_writing({(stamp.device, stamp.inode) for stamp in found.files.values()})
        return why_incomplete(found.files, indexes, writing) is None

    def _small(self, found: Found, path: str, stamp: Stamp) -> bytes | None:
        try:
            return self.directory.read_small(f"{found.prefix}{path}", stamp, LONGEST_READ)
        except DiskFailedError:
            return None

    async def _push(self, found: Found) -> None:
        """``ChangedError``: it is another one by now, and nothing of it became visible."""
        if self.pushed.fingerprints.get(found.name) == found.fingerprint:
            return
        read = {
            path: content
            for path in READ
            if path in found.files
            and (content := await in_thread(self._small, found, path, found.files[path])) is not None
        }
        described = describe(found.files, read)
        details = CheckpointDetails(
            checkpoint_type=described.type,
            base_model=described.base_model,
            lora_adapter_config=dict(described.lora_adapter_config) if described.lora_adapter_config else None,
            created_at=found.newest,
            skipped=list(found.skipped),
        )
        files = [
            SentFile(path, stamp.size, partial(self._read, f"{found.prefix}{path}", stamp))
            for path, stamp in sorted(found.files.items())
        ]

        async def check() -> None:
            now = checkpoints_in(await in_thread(self.directory.look)).get(found.name)
            if now is None or now.fingerprint != found.fingerprint:
                raise ChangedError(found.name)

        source = str(replace(self.job, checkpoint=found.name))
        mirror = await self.pusher.push(source, files, details, check)
        await in_thread(self.pushed.add, found.name, found.fingerprint)
        self.on_pushed(found, mirror)

    def _read(self, path: str, stamp: Stamp, part: ByteRange, buffer: memoryview) -> None:
        if not self.directory.read(path, stamp, part, buffer):
            raise ChangedError(path)
