"""Sync a job's checkpoint directory: scan, wait until a checkpoint has settled, push, and scan again before the commit.

The syncer runs beside the training process and never blocks it. Files of 1 MiB or more are sent ahead once unchanged
for 5 s. A journal records the chunks that were sent: a restarted syncer sends nothing twice and reads no chunk of a
large file twice.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from bdn.core.chunk import ByteRange, chunk_count, digest_of
from bdn.core.errors import BdnError, DiskFailedError, InvalidSourceError, QuotaExceededError
from bdn.core.manifest import is_small
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.training.checkpoints import (
    LONGEST_DESCRIBED,
    LONGEST_READ,
    LOOSE,
    READ,
    by_number,
    describe,
    place_of,
)
from bdn.core.training.settling import Settling, Stamp, why_incomplete
from bdn.core.training.wholeness import why_not_whole
from bdn.disk.threads import in_thread
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import CheckpointDetails, skipped_within_bounds
from node_agent.background_tasks import happens_within
from node_agent.job.journal import Committed, VolumeJournal
from node_agent.job.pushing import Pusher, SentFile
from node_agent.job.tree import ChangedError, JobDirectory, JobTree, open_for_writing

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 2.0
_PAUSES: Final = 10  # times the duration of a scan, which takes 1 s for 100,000 files
LONGEST_PAUSE_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 30.0
_LATEST: Final = 253_402_300_799  # the last second of the year 9999
_LONGEST_NAMED: Final = 1000  # characters of a skipped path: a job may make a path ten times as long
# Multiple of the directory's bound. Compressing file systems report sizes above the space used.
_SPARSE: Final = 16
_INDEXES: Final = 4 * LONGEST_READ  # bytes of all indexes of one checkpoint; sparse files cost a job nothing
_MARK: Final = 16  # hexadecimal digits: only the job itself can forge a collision
_OF_ONE: Final = {QuotaExceededError.code, DiskFailedError.code}  # errors that do not affect other checkpoints
AGAIN_SECONDS: Final = 60.0  # after a failed push


@dataclass(frozen=True)
class Found:
    """A checkpoint as scanned; paths are relative to the checkpoint."""

    name: str
    files: Mapping[str, Stamp]
    skipped: Sequence[str]
    # file path → target below the directory, for symbolic links
    targets: Mapping[str, str] = field(default_factory=dict)
    is_unreadable: bool = False  # at least one file cannot be read

    @property
    def prefix(self) -> str:
        return "" if self.name == LOOSE else f"{self.name}/"

    def place(self, path: str) -> str:
        """Path relative to the job's directory, with links resolved."""
        return self.targets.get(path, f"{self.prefix}{path}")

    @property
    def size(self) -> int:
        return sum(stamp.size for stamp in self.files.values())

    def marks(self) -> frozenset[str]:
        """One mark per file, which changes with the file's content, name or identity.

        Marks omit the device number, which changes at a reboot.
        """
        stamps = ((path, stamp._replace(device=0)) for path, stamp in self.files.items())
        return frozenset(digest_of(json.dumps([path, *stamp]).encode()).hex[:_MARK] for path, stamp in stamps)

    @property
    def state(self) -> str:
        return digest_of("".join(sorted(self.marks())).encode()).hex[: 2 * _MARK]

    @property
    def newest(self) -> datetime:
        """Modification time of the newest file, clamped to 1970 to 9999 because jobs set times freely."""
        seconds = max(stamp.mtime for stamp in self.files.values()) / 1e9
        return datetime.fromtimestamp(min(max(seconds, 0), _LATEST), UTC)


def checkpoints_in(tree: JobTree) -> dict[str, Found]:
    """Checkpoints by name. Folders without files are skipped."""
    files: dict[str, dict[str, Stamp]] = {}
    for path, stamp in tree.files.items():
        if (place := place_of(path)) is not None:
            files.setdefault(place[0], {})[place[1]] = stamp
    skipped: dict[str, list[str]] = {}
    for path, why in tree.skipped.items():
        if (place := place_of(path)) is not None:
            skipped.setdefault(place[0], []).append(f"{path!a:.{_LONGEST_NAMED}}: {why}")
    unreadable = {place[0] for path in tree.unreadable if (place := place_of(path)) is not None}
    targets: dict[str, dict[str, str]] = {}
    for path, target in tree.targets.items():
        if (place := place_of(path)) is not None:
            targets.setdefault(place[0], {})[place[1]] = target
    return {
        name: Found(name, found, skipped.get(name, ()), targets.get(name, {}), name in unreadable)
        for name, found in files.items()
    }


@dataclass
class Syncer:
    """Pushes the checkpoints below a directory as checkpoints of ``job``, which names a project, a job and a rank.

    ``on_pushed`` is called after each push. ``clock`` is monotonic. With ``is_noting``, complete checkpoints are
    synced to disk and recorded before the push; after a power cut the record separates them from half-written ones.
    After a failure each method may be called again.
    """

    directory: JobDirectory
    job: CheckpointUri
    pusher: Pusher
    journal: VolumeJournal
    on_pushed: Callable[[Mirror], object] = lambda _: None
    settle_seconds: float = SETTLE_SECONDS
    is_noting: bool = False
    most_bytes: int | None = None  # the directory's bound; None is unlimited
    clock: Callable[[], float] = time.monotonic
    unsynced_bytes: int = field(default=0, init=False)  # of all checkpoints that are not committed, from the last scan
    unsynced: Sequence[str] | None = field(default=None, init=False)  # names; None before the first scan
    left: Sequence[str] = field(default=(), init=False)  # names that ``run_once`` found incomplete
    newest: tuple[datetime, str | None] | None = field(default=None, init=False)  # pushed checkpoint: time, grant
    error: BdnError | None = field(default=None, init=False)  # of the last push
    reasons: dict[str, str] = field(default_factory=dict, init=False)  # checkpoint name → why it is incomplete
    skipped: Mapping[str, str] = field(default_factory=dict, init=False)  # path → why it is not pushed
    _settling: Settling = field(init=False)
    _again_at: dict[str, float] = field(default_factory=dict)
    # Version and the files seen last.
    _pushed: dict[str, tuple[str, Mapping[str, Stamp]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settling = Settling(self.settle_seconds)

    async def run(self, over: asyncio.Event | None = None) -> None:
        """Sync until ``over`` is set. A failed push is retried after a minute and does not block other checkpoints."""
        over = over or asyncio.Event()
        while not over.is_set():
            began = self.clock()
            now, known = await in_thread(self._look)
            pause = min(max(LOOK_SECONDS, _PAUSES * (self.clock() - began)), LONGEST_PAUSE_SECONDS)
            for name in self.unsynced or ():
                if over.is_set() or self._again_at.get(name, now) > now:
                    continue
                try:
                    await self._go_on(known[name], now)
                except ChangedError:
                    continue  # the job still writes
                except BdnError as error:
                    self.error = error
                    self._again_at[name] = self.clock() + AGAIN_SECONDS
                    facts = {"code": error.code, "error": str(error)}
                    logger.warning("checkpoint %a was not pushed; retrying", name, extra=facts)
            await happens_within(pause, over)

    async def _go_on(self, found: Found, now: float) -> None:
        """Push a settled checkpoint, or send its unchanging files ahead, so that little remains when it settles."""
        if self._settling.is_settled(found.name, now):
            if await in_thread(self._is_complete, found):
                await self._push(found)
            return
        rested = self._settling.rested(found.name, now)
        files = await in_thread(self._unsent, found, rested)
        if files:
            await self.pusher.send(self._source(found), files)

    async def run_once(self, *, is_after_restart: bool = False) -> list[str]:
        """Push all complete checkpoints without waiting; returns the names of incomplete ones.

        After a reboot only checkpoints that were recorded as settled and are unchanged are pushed, because a power
        cut may have lost part of any other.

        Raises ``BdnError``: at once if the mirror does not answer; after all other pushes if one checkpoint is refused
        or cannot be read.
        """
        left: list[str] = []
        refusal: BdnError | None = None
        tree = await in_thread(self.directory.look)
        self.skipped = {path: why for path, why in tree.skipped.items() if place_of(path) is not None}
        known = await in_thread(checkpoints_in, tree)
        await in_thread(self._count, known)
        await self._confirm(known)
        if not is_after_restart:
            await in_thread(self._note, [known[name] for name in self.unsynced or ()])
        for name in self.unsynced or ():
            found = known[name]
            try:
                if await in_thread(self._is_as_noted if is_after_restart else self._is_complete, found):
                    await self._push(found)
                    continue
            except ChangedError:
                self.reasons[name] = "it changed while it was pushed"
            except InvalidSourceError as error:
                self.reasons[name] = str(error)
                logger.warning("checkpoint %a was not pushed", name, extra={"error": f"{error!a}"})
            except BdnError as error:
                if error.transient and error.code not in _OF_ONE:
                    raise
                refusal = error
                continue
            left.append(name)
        await in_thread(self._count, known)
        self.left = left
        if refusal is not None:
            raise refusal
        return left

    async def drain(self, given_up: asyncio.Event, *, is_after_restart: bool) -> None:
        """Push what the run left, until ``given_up``. Raises as ``run_once``.

        Retries incomplete checkpoints for as long as settling takes: a process may still be writing them.
        """
        waited = 0.0
        while await self.run_once(is_after_restart=is_after_restart) and not given_up.is_set():
            if is_after_restart or waited >= self.settle_seconds:
                return
            await happens_within(LOOK_SECONDS, given_up)
            waited += LOOK_SECONDS

    async def _confirm(self, known: Mapping[str, Found]) -> None:
        """Mark versions that the mirror has lost as unsynced, e.g. after a database restore. Raises ``BdnError``.

        A checkpoint that was deleted from the mirror is also pushed again, as long as the job has it.
        """
        for name in known.keys() - set(self.unsynced or ()):
            committed = self.journal.committed(name)
            if committed is None:
                continue
            if not await self.pusher.has_committed(self._source(known[name]), committed.version, committed.at):
                logger.warning("the mirror has lost a pushed checkpoint; pushing it again", extra={"checkpoint": name})
                await in_thread(self.journal.note_lost, name)
                self._pushed.pop(name, None)
        await in_thread(self._count, known)

    def _is_pushed(self, found: Found) -> bool:
        """Whether all remaining files are committed.

        A job that rotates checkpoints may end while it deletes one; the committed version then stays.
        """
        committed = self.journal.committed(found.name)
        if committed is None:
            return False
        seen = committed.version, found.files
        if self._pushed.get(found.name) != seen:
            if not found.marks() <= committed.marks:
                return False
            self._pushed[found.name] = seen
        return True

    def _look(self) -> tuple[float, dict[str, Found]]:
        """Scan the directory; returns the time and the checkpoints. Drops state of deleted ones.

        Blocking: up to a million files.
        """
        tree = self.directory.look()
        now, known = self.clock(), checkpoints_in(tree)
        self._settling.look(now, {name: found.files for name, found in known.items()}, tree.folders)
        self.journal.retain(tree.files)
        self._pushed = {name: seen for name, seen in self._pushed.items() if name in known}
        self.reasons = {name: why for name, why in self.reasons.items() if name in known}
        self._count(known)
        self._note([known[name] for name in self.unsynced or () if self._settling.is_settled(name, now)])
        return now, known

    def _count(self, known: Mapping[str, Found]) -> None:
        unsynced = [found for found in known.values() if not self._is_pushed(found)]
        # the mirror treats the last push as the newest
        unsynced.sort(key=lambda one: (one.newest, by_number(one.name)))
        self.unsynced = [found.name for found in unsynced]
        self.unsynced_bytes = sum(found.size for found in unsynced)

    def _is_complete(self, found: Found) -> bool:
        why = self._why_incomplete(found)
        if why is None:
            self.reasons.pop(found.name, None)
        elif self.reasons.get(found.name) != why:
            self.reasons[found.name] = why
            logger.warning("checkpoint %a is incomplete; not pushing it: %a", found.name, why[:_LONGEST_NAMED])
        return why is None

    def _why_incomplete(self, found: Found) -> str | None:
        """A file open for writing, a missing shard, a violation of the format, or the job's own marker.

        Also incomplete: an unreadable file, or a size far above the bound, which means mostly holes.
        """
        if found.is_unreadable:
            return next((why for why in found.skipped if ": cannot be read" in why), "some of it cannot be read")
        if self.most_bytes is not None and found.size > _SPARSE * self.most_bytes:
            return "it is much larger than the limit of its directory"
        left = _INDEXES

        def read(path: str) -> bytes | bytearray | None:
            nonlocal left
            left -= found.files[path].size
            return None if left < 0 else self._small(found, path, LONGEST_READ)

        def writing() -> set[tuple[int, int]]:
            return open_for_writing({(stamp.device, stamp.inode) for stamp in found.files.values()})

        return why_incomplete(found.files, read, writing) or why_not_whole(
            {path: stamp.size for path, stamp in found.files.items()},
            partial(self._part, found),
            is_first_rank=not self.job.rank,
            is_loose=found.name == LOOSE,
        )

    def _is_as_noted(self, found: Found) -> bool:
        return self.journal.settled(found.name) == found.state

    def _note(self, settled: Iterable[Found]) -> None:
        """Record settled checkpoints before the first push, which may take hours.

        Skips failures: the push will report them.
        """
        for found in settled if self.is_noting else ():
            with suppress(ChangedError, DiskFailedError):
                if not self._is_as_noted(found) and self._is_complete(found):
                    self._note_settled(found)

    def _note_settled(self, found: Found) -> None:
        if self.journal.settled(found.name) == found.state:
            return
        if not self.directory.make_durable({found.place(path): stamp for path, stamp in found.files.items()}):
            raise ChangedError(found.name)
        self.journal.note_settled(found.name, found.state)

    def _part(self, found: Found, path: str, start: int, stop: int) -> bytearray | None:
        try:
            return self.directory.read_part(found.place(path), found.files[path], ByteRange(start, stop))
        except DiskFailedError:
            return None

    def _small(self, found: Found, path: str, limit: int) -> bytes | bytearray | None:
        try:
            return self.directory.read_small(found.place(path), found.files[path], limit)
        except DiskFailedError:
            return None

    async def _push(self, found: Found) -> None:
        """Raises ``ChangedError`` if the checkpoint changed meanwhile; then nothing was committed."""
        if self.is_noting:
            await in_thread(self._note_settled, found)
        details = await in_thread(self._details, found)
        files = await in_thread(self._files, found, found.files)

        async def check() -> None:
            now = (await in_thread(lambda: checkpoints_in(self.directory.look()))).get(found.name)
            if now is None or now.files != found.files:
                raise ChangedError(found.name)

        mirror = await self.pusher.push(self._source(found), files, details, check)
        at = mirror.completed_at.timestamp() if mirror.completed_at else 0.0
        version = Committed(mirror.id, await in_thread(found.marks), at)
        await in_thread(self.journal.note_commit, found.name, version)
        self.error = None
        if self.newest is None or found.newest >= self.newest[0]:
            self.newest = found.newest, mirror.grant
        self.on_pushed(mirror)

    def _details(self, found: Found) -> CheckpointDetails:
        read = {
            path: content
            for path in READ
            if path in found.files and (content := self._small(found, path, LONGEST_DESCRIBED)) is not None
        }
        described = describe(found.files, read)
        return CheckpointDetails(
            checkpoint_type=described.type,
            base_model=described.base_model,
            lora_adapter_config=dict(described.lora_adapter_config) if described.lora_adapter_config else None,
            created_at=found.newest,
            skipped=skipped_within_bounds(found.skipped),
        )

    def _source(self, found: Found) -> str:
        """Raises ``InvalidSourceError`` if the folder's name would parse as a different checkpoint."""
        uri = replace(self.job, checkpoint=found.name)
        if parse_source(str(uri)) != uri:
            raise InvalidSourceError(str(uri), f"a folder named {found.name!a} cannot be a checkpoint; rename it")
        return str(uri)

    def _unsent(self, found: Found, paths: Collection[str]) -> list[SentFile]:
        """Large files with unsent chunks. Small files are in slabs, which depend on all neighbouring files."""
        files = (file for file in self._files(found, paths) if not is_small(file.size))
        return [file for file in files if len(file.known) < chunk_count(file.size)]

    def _files(self, found: Found, paths: Collection[str]) -> list[SentFile]:
        files: list[SentFile] = []
        for path in sorted(paths):
            place, stamp = found.place(path), found.files[path]
            known, note = self.journal.chunks(place, stamp), partial(self.journal.note_chunk, place, stamp)
            files.append(SentFile(path, stamp.size, partial(self.directory.opened, place, stamp), known, note))
        return files
