"""Files that clients of hub gateways request: copied into few manifests, with the credentials of one organisation."""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.errors import BdnError, InternalError, NotFoundError
from bdn.core.source.upstream import Identity
from bdn.core.source.uri import COUNT_LIMIT, Auth, AuthMethod, HuggingFaceUri, Patterns, WeightsSource, select
from bdn.core.store import PUBLIC, scope_of
from bdn.mirror.db import events, identities, manifests, mirrors
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.mirror.db.waiting import in_background
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.wire.grants import Grant, GrantedMount
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS
from bdn.wire.hub_schema import LONGEST_BEGINNING, HubContent
from bdn.wire.mirror_schema import TERMINAL, Mirror, WeightsSourceBody
from bdn.wire.shapes import ReportedError

logger = logging.getLogger(__name__)
_MOUNT: Final = "/gateway"  # of mirrors that clients' requests began
_NEXT_SECONDS: Final = 5.0  # files that are requested while a mirror of the commit runs wait so long for the next one
_FAILED_SECONDS: Final = 10.0  # until a copy that failed is tried again
_REMEMBERED: Final = 10_000  # commits with the branch that named them
_REPLACED: Final = "hub gateway: a newer manifest has its files"


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file of a repository's commit. ``repository`` has no revision."""

    repository: HuggingFaceUri
    sha: str
    path: str

    @property
    def commit(self) -> HuggingFaceUri:
        return replace(self.repository, revision=self.sha)


@dataclass
class GatewayCopies:
    """``secret`` is the name of the organisation's secret for the hub; None: it copies public repositories only."""

    requests: MirrorRequests
    organisation: str
    secret: str | None
    _named: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)  # revisions, by repository, commit
    _arrivals: dict[WantedFile, asyncio.Future[None]] = field(default_factory=dict)  # end when copied, or failed
    _queued: dict[HuggingFaceUri, list[WantedFile]] = field(default_factory=dict)  # for the next mirror of a commit
    _queues: set[HuggingFaceUri] = field(default_factory=set)  # commits with a task
    _running: dict[WantedFile, str] = field(default_factory=dict)  # mirrors
    _failed: dict[WantedFile, tuple[BdnError, float]] = field(default_factory=dict)  # and until when that is known
    _group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the block lasts, files are copied. A mirror that was requested continues after it."""
        entered = asyncio.Event()

        async def copying() -> None:
            async with self._group:
                entered.set()
                await asyncio.Event().wait()  # until canceled, and the tasks of the group with it

        async with in_background(copying()):
            await entered.wait()
            yield

    def remember(self, repository: HuggingFaceUri, sha: str, revision: str) -> None:
        """Mirrors of the commit have the name of the branch by which clients know it."""
        key = str(repository), sha
        self._named[key] = revision
        self._named.move_to_end(key)
        while len(self._named) > _REMEMBERED:
            self._named.popitem(last=False)

    # --- what is held ---

    async def find(self, wanted: WantedFile) -> MirrorSourceRow | None:
        """A mirrored source with the file: the newest that clients began, else the smallest; a node makes room for all of it."""
        rows = [row for row in await self._rows(wanted) if _selects(row, wanted.path)]
        began = [row for row in rows if row.mount_location == _MOUNT]
        return began[0] if began else min(rows, key=lambda row: row.bytes_total or 0, default=None)

    async def _rows(self, wanted: WantedFile) -> list[MirrorSourceRow]:
        async with self.requests.database.read() as session:
            return await mirrors.ready_at(session, self.organisation, None, str(wanted.repository), wanted.sha)

    async def content(self, row: MirrorSourceRow, path: str, size: int) -> HubContent:
        database = self.requests.database
        await manifests.note_use(database, str(row.manifest), database.now())
        mount = GrantedMount(_MOUNT, Digest(str(row.manifest)), row.source)
        grant = Grant(self.organisation, (mount,), database.now() + self.requests.grant_seconds)
        return HubContent(manifest=f"b3:{row.manifest}", path=path, size=size, grant=self.requests.signer.sign(grant))

    async def beginning(self, *place: str, start: int) -> bytes:
        """Bytes of a file from ``start``, also while the file is copied; at most ``LONGEST_BEGINNING``.

        ``place`` is its identity without a scope. Empty if the chunk is not stored, or not a chunk of its own. The
        file's checksum is not known to agree.
        """
        index, offset = divmod(start, CHUNK_SIZE)
        keys = [Identity.of(scope, *place).key for scope in (PUBLIC, scope_of(self.organisation))]
        async with self.requests.database.read() as session:
            found = await identities.find(session, keys)
        chunk = next((one.chunks[index] for one in found.values() if not one.is_slab and index in one.chunks), None)
        return b"" if chunk is None else await asyncio.to_thread(self._read, chunk, offset)

    def _read(self, chunk: Digest, offset: int) -> bytes:
        try:
            with self.requests.surveyor.store.open(chunk, reader=self.organisation) as file:
                file.seek(offset)
                return file.read(LONGEST_BEGINNING)
        except NotFoundError:
            return b""

    # --- copies ---

    async def copy(self, wanted: WantedFile, wait_seconds: float) -> float | None:
        """Have the file copied. Returns when it is copied, or after ``wait_seconds`` the seconds that are left, if known.

        Raises why it was not copied.
        """
        self._check_failed(wanted)
        arrival = self._arrivals.get(wanted)
        if arrival is None:
            arrival = self._arrivals[wanted] = asyncio.get_running_loop().create_future()
            self._queued.setdefault(wanted.commit, []).append(wanted)
            if wanted.commit not in self._queues:
                self._queues.add(wanted.commit)
                self._group.create_task(self._copy_queued(wanted.commit))
        await asyncio.wait([arrival], timeout=wait_seconds)
        self._check_failed(wanted)
        mirror = self._running.get(wanted)
        return None if mirror is None else (await self.requests.get(mirror, self.organisation)).eta_seconds

    def _check_failed(self, wanted: WantedFile) -> None:
        error, until = self._failed.get(wanted, (None, 0.0))
        if error is not None and time.monotonic() < until:
            raise error

    async def _copy_queued(self, commit: HuggingFaceUri) -> None:
        """Files that are requested within seconds are one mirror. A mirror that takes longer holds up no other."""
        try:
            while files := self._queued.pop(commit, None):
                await asyncio.wait([self._group.create_task(self._copy_all(files))], timeout=_NEXT_SECONDS)
        finally:
            self._queues.discard(commit)

    async def _copy_all(self, files: list[WantedFile]) -> None:
        try:
            rows = await self._rows(files[0])
            missing = [file for file in files if not any(_selects(row, file.path) for row in rows)]
            if missing:
                await self._copy_missing(missing)
        except Exception as error:
            if not isinstance(error, BdnError):
                logger.exception("files of %s are not copied because of a bug", files[0].commit)
            self._note_failed(files, error if isinstance(error, BdnError) else InternalError(repr(error)))
        finally:
            for file in files:
                self._arrivals.pop(file).set_result(None)

    async def _copy_missing(self, files: list[WantedFile]) -> None:
        failure = await self._extended(files)
        if failure is not None and len(files) == 1:
            self._note_failed(files, failure)
        elif failure is not None:  # one of them may be why
            for file in files:
                await self._copy_missing([file])

    def _note_failed(self, files: Iterable[WantedFile], error: BdnError) -> None:
        now = time.monotonic()
        self._failed = {file: known for file, known in self._failed.items() if known[1] > now}
        self._failed.update((file, (error, now + _FAILED_SECONDS)) for file in files)

    async def _extended(self, files: list[WantedFile]) -> BdnError | None:
        """Mirror these files with those that clients requested before, as one manifest. Returns why it failed."""
        before = [row for row in await self._rows(files[0]) if row.mount_location == _MOUNT]
        known = {pattern for row in before for pattern in row.request.get("allow_patterns") or ()}
        new = {_literal(file.path) for file in files}
        allow = sorted(new | known if len(new | known) <= COUNT_LIMIT else new)
        mirror = await self._mirrored(files, allow)
        if mirror.error is not None:
            return ReportedError(mirror.error)
        await self._give_up(*(row for row in before[1:] if set(row.request.get("allow_patterns") or ()) <= set(allow)))
        await self.requests.trees.files(files[0].commit, self.organisation, is_held=False)
        return None

    async def _mirrored(self, files: list[WantedFile], allow: list[str]) -> Mirror:
        """Mirror files of the commit, under the name of the branch by which clients know it, until it is over."""
        repository, sha = files[0].repository, files[0].sha
        auth = Auth(AuthMethod.CUSTOM_SECRET, {"auth_secret_name": self.secret}) if self.secret else None
        uri = replace(repository, revision=self._named.get((str(repository), sha), sha))
        wanted = WeightsSource(uri, _MOUNT, Patterns(tuple(allow)), auth)
        mirror = await self.requests.request([wanted], self.organisation)
        self._running.update(dict.fromkeys(files, mirror.id))
        try:
            while mirror.status not in TERMINAL:
                mirror = await self.requests.wait(mirror.id, self.organisation, LONGEST_WAIT_SECONDS)
        finally:
            for file in files:
                del self._running[file]
        if mirror.error is None and mirror.sources[0].resolved_revision != sha:
            # The branch has moved; this commit is known by its own name from now on.
            self._named.pop((str(repository), sha), None)
            return await self._mirrored(files, allow)
        return mirror

    async def _give_up(self, *replaced: MirrorSourceRow) -> None:
        """Manifests that a later one contains. The newest of them stays: nodes may be reading it."""
        database, names = self.requests.database, sorted({str(row.manifest) for row in replaced})
        now, facts = database.now(), {"eviction": _REPLACED, "restorable_until": None}
        async with database.write() as session:
            await manifests.lock(session, names)
            places = {(row.mirror_id, row.position) for row in replaced}
            spared = await mirrors.named_beside(session, self.organisation, names, places)
            gone = [name for name in names if name not in spared]
            await mirrors.give_up(session, self.organisation, gone, _REPLACED, now)
            told = (events.event_of("tombstoned", facts, name, organisation=self.organisation) for name in gone)
            await events.record(session, now, told)


def _selects(row: MirrorSourceRow, path: str) -> bool:
    if row.mount_location == _MOUNT:  # of up to a thousand patterns
        return _literal(path) in row.request.get("allow_patterns", ())
    patterns = WeightsSourceBody.model_validate(row.request).to_core().patterns
    return bool(select([path], patterns).paths)


def _literal(path: str) -> str:
    """A pattern that selects this path alone, whatever characters it has."""
    return re.sub(r"([\[*?])", r"[\1]", path)
