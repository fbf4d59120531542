"""Pushes: mirrors whose bytes come from inside, chunk by chunk, and which become checkpoints.

A push is a mirror at work that no worker has: so it is seen, counted, canceled and protected from collections as every mirror is. It
is claimed by ``PUSHED`` as long as somebody calls for it. When nobody has for ``GIVEN_UP_SECONDS`` a worker takes it, and it fails.
A collection waits for a push until ``PUSH_SECONDS`` after the push began, so that an open push does not stop collections. The commit of
an old push renews the push: it protects each chunk that the store still holds, and answers CHUNKS_MISSING for the rest.
What was sent stays as long as other half-copied files do, and the next push of its organisation finds it.
"""

import asyncio
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from sqlalchemy.exc import IntegrityError

from bdn.core.chunk import (
    CHUNK_SIZE,
    Digest,
    FileEntry,
    FileLayout,
    ManifestDocument,
    ManifestWriter,
    UnsafePathError,
    check_tree,
    normalise_path,
)
from bdn.core.errors import (
    BdnError,
    ChunksMissingError,
    Fact,
    InvalidRequestError,
    InvalidSourceError,
    LimitExceededError,
    NotFoundError,
    QuotaExceededError,
    StoreUnavailableError,
)
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.store import ChunkStore, split_digests
from bdn.core.training.checkpoints import is_loadable
from bdn.mirror.access.access import Access, NotPermittedError, PushAccess
from bdn.mirror.chunks.damages import Damages
from bdn.mirror.db import checkpoints, contents, events, mirrors, projects
from bdn.mirror.db.checkpoints import PushScope
from bdn.mirror.db.database import Database, WriteSession, batches
from bdn.mirror.db.mirrors import PUSH_SECONDS, PUSHED
from bdn.mirror.db.tables import MirrorRow
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.projects import gone_events
from bdn.mirror.serving.served_chunks import answer_of
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.transfer.batching import Batched
from bdn.wire.access_schema import DEFAULT_TEAM
from bdn.wire.grants import PushGrant
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import (
    CommitRequest,
    CommittedPush,
    Push,
    PushedFile,
    PushGrantDocument,
    PushGrantRequest,
)
from bdn.wire.shapes import body_of, moment

GIVEN_UP_SECONDS: Final = 3600.0
_MOUNT: Final = "/checkpoint"  # where a grant of the push itself places it
_OLD_SECONDS: Final = PUSH_SECONDS / 2  # the commit of an older push renews the push first
_LAST_SECONDS: Final = (
    PUSH_SECONDS * 3 / 4
)  # an older push is not published: collections may have stopped waiting for it
_CLOCKS_SECONDS: Final = 600.0  # by which the clocks of processes that put chunks may differ
_NAMED_MISSING: Final = 10
_KNOWN: Final = 10_000  # pushes whose owner is remembered


def _named(source: str) -> CheckpointUri:
    """The one checkpoint of one job that a push is for. Raises ``InvalidSourceError``."""
    uri = parse_source(source)
    if not isinstance(uri, CheckpointUri) or uri.job is None or uri.checkpoint is None:
        raise InvalidSourceError(
            source, f"a push is of one checkpoint of one job, bt://project@job/name, not of {source!r}"
        )
    return uri


def _ended(push_id: str, row: MirrorRow | None = None) -> BdnError:
    """Why a push accepts no more calls: its quota failure, repeated to each call; NotFoundError otherwise."""
    error = row.error if row else None
    if error and error["code"] == QuotaExceededError.code:
        return QuotaExceededError(**error["details"])
    return NotFoundError(f"push {push_id} that goes on")


@dataclass(eq=False, slots=True)
class _Owned:
    """A push that goes on: whose project it is for, which checkpoint, and since when nothing that it brought is collected.

    ``recorded`` writes chunks and their sizes to the database; ``reserved`` counts their bytes before they are stored.
    """

    id: str
    scope: PushScope
    uri: CheckpointUri
    started_at: float
    recorded: Batched[tuple[Digest, int], None] = field(init=False)
    reserved: Batched[tuple[Digest, int], int] = field(init=False)

    def is_of(self, pusher: PushAccess | None) -> bool:
        """Whether it is this one's organisation's and team's, or nobody is asked for."""
        return pusher is None or (
            pusher.organisation == self.scope.organisation and pusher.team in (None, self.scope.team)
        )


@dataclass
class Pushes:
    """The service behind ``/pushes``.

    ``limit_bytes`` is that of an organisation's checkpoints together, and likewise of what its pushes sent and did not commit yet.
    """

    database: Database
    store: ChunkStore
    access: Access
    damages: Damages
    requests: MirrorRequests
    limit_files: int
    limit_bytes: int | None
    _owned: dict[str, _Owned] = field(default_factory=dict)

    async def begin(self, source: str, pusher: PushAccess, data_port: int | None) -> Push:
        """A new push, or the one of the same checkpoint that goes on.

        Raises:
            NotPermittedError: the bearer's grant is for others.
            InvalidSourceError, InvalidRequestError: it names no checkpoint of one job, or no project of one team.
        """
        uri, organisation = _named(source), pusher.organisation
        if not pusher.may_push(uri):
            raise NotPermittedError(f"this grant is for checkpoints of {pusher.grant and pusher.grant.job} alone")
        request = {"source": str(uri), "mount_location": _MOUNT}
        while True:
            async with self.database.read() as session:
                project = await projects.find(session, organisation, uri.project, pusher.team)
                team = project.team if project else pusher.team or DEFAULT_TEAM
                key = mirrors.push_key(str(uri), team)
                push_id = await mirrors.running(session, organisation, key)
            if push_id is not None:
                break
            fresh = f"mir_{secrets.token_hex(12)}"
            try:
                async with self.database.write() as session:
                    now = self.database.now()
                    await mirrors.insert(session, fresh, organisation, key, [request], now=now, team=team)
                    await mirrors.take(session, fresh, PUSHED, min(now, time.time()), now + GIVEN_UP_SECONDS)
            except IntegrityError:
                continue  # somebody else was faster
            push_id = fresh
        push = await self._get(push_id, pusher)
        async with self.database.write() as session:
            await self._go_on(session, push)
        expires_at = moment(self.database.now() + GIVEN_UP_SECONDS)
        return Push(push_id=push_id, expires_at=expires_at, data_port=data_port)

    async def committed(self, source: str, pusher: PushAccess) -> CommittedPush:
        """The push that brought the newest version of a checkpoint, which this pusher may push. Raises ``NotFoundError``."""
        uri = _named(source)
        async with self.database.read() as session:
            found = await checkpoints.committed(session, pusher.organisation, pusher.team, uri)
        if found is None or not pusher.may_push(uri):
            raise NotFoundError(f"checkpoint {uri}")
        push_id, committed_at = found
        return CommittedPush(push_id=push_id, source=str(uri), committed_at=moment(committed_at))

    async def missing(self, push_id: str, pusher: PushAccess, chunks: Sequence[Digest]) -> list[Digest]:
        """The chunks that have to be sent. This team pushed the others, or the pusher may read them; they are kept for this push.

        A chunk of another team is answered as one that does not exist.
        """
        push = await self._get(push_id, pusher)
        async with self.database.read() as session:
            held = await checkpoints.pushed_chunks(session, push.scope, chunks)
            others = [one for one in chunks if one not in held]
            for team in _counted_on(pusher, push.scope):
                held |= await checkpoints.readable_chunks(session, push.scope.organisation, others, team)
        kept = await asyncio.to_thread(self.store.keep, list(held))
        layouts = [FileLayout.of(held[chunk], (chunk,)) for chunk in held if chunk in kept]
        if layouts:
            async with self.database.write() as session:
                await self._go_on(session, push)
                await checkpoints.record(session, push.scope, layouts, self.database.now())
        return [chunk for chunk in dict.fromkeys(chunks) if chunk not in kept]

    async def check(self, bearer: str | None, push_id: str) -> str:
        """The organisation of the push, checked for this bearer. ``NotFoundError``: a foreign push, or one that has ended."""
        pusher = await self.access.pusher(bearer)
        return (await self._get(push_id, None if pusher.is_operator else pusher)).scope.organisation

    async def reserve(self, push_id: str, chunk: Digest, size: int) -> int:
        """Count a chunk against the organisation's limit of uncommitted bytes, before it is stored. Returns the counted bytes.

        Raises ``QuotaExceededError``: it goes beyond the limit. Its push fails, which frees its bytes for other pushes.
        """
        if self.limit_bytes is None:
            return 0
        push = await self._get(push_id, None)
        try:
            return await push.reserved.of((chunk, size))
        except QuotaExceededError as error:
            async with self.database.write() as session:
                await mirrors.finish(
                    session, push.id, "FAILED", now=self.database.now(), error=body_of(error).model_dump()
                )
            self._forget(push)
            raise

    async def _reserve(self, push: _Owned, chunks: Sequence[tuple[Digest, int]]) -> list[int]:
        async with self.database.write() as session:
            uncommitted = await mirrors.hold_uncommitted(session, push.scope.organisation)
            await self._go_on(session, push)
            known = await checkpoints.pushed_chunks(session, push.scope, dict(chunks), push.started_at)
            sizes = {digest: size for digest, size in chunks if digest not in known}
            needed = uncommitted + sum(sizes.values())
            if sizes and self.limit_bytes is not None and needed > self.limit_bytes:
                raise QuotaExceededError(needed, self.limit_bytes)
            await mirrors.add_transferred(session, push.id, sum(sizes.values()))
        return [sizes.pop(digest, 0) for digest, _ in chunks]

    async def release(self, push_id: str, size: int) -> None:
        """Remove a chunk that was not stored from the count."""
        async with self.database.write() as session:
            await mirrors.add_transferred(session, push_id, -size)

    async def record(self, push_id: str, chunk: Digest, size: int) -> None:
        """A chunk is durable in the store, and the push counts on it from now on."""
        await (await self._get(push_id, None)).recorded.of((chunk, size))

    async def _record(self, push: _Owned, chunks: Sequence[tuple[Digest, int]]) -> list[None]:
        layouts = [FileLayout.of(size, (digest,)) for digest, size in chunks]
        async with self.database.write() as session:
            await self._go_on(session, push)
            await checkpoints.record(session, push.scope, layouts, self.database.now())
            if self.limit_bytes is None:  # otherwise they were counted before they were stored
                await mirrors.add_transferred(session, push.id, sum(size for _, size in chunks))
        return [None] * len(chunks)

    async def commit(
        self, push_id: str, pusher: PushAccess, request: CommitRequest, *, is_agent: bool = False
    ) -> Mirror:
        """Make the checkpoint visible, whole; said again, the same answer.

        A grant to push reads nothing, so the answer to its bearer has no grant to read; except for an agent, which keeps the
        newest checkpoint of its job.

        Raises:
            ChunksMissingError: some of it is not here.
            InvalidRequestError: it is no tree of files, or the chunks do not make up their files.
            LimitExceededError, QuotaExceededError: it is too much.
            NotFoundError: the push has ended otherwise.
        """
        layouts = await asyncio.to_thread(self._layouts, request.files)
        document = await asyncio.to_thread(_document, layouts)
        is_reader = pusher.grant is None or is_agent
        if (done := await self._committed(push_id, pusher, document)) is not None:
            return done if is_reader else _unreadable(done)
        push = await self._get(push_id, pusher)
        await self.damages.heal()
        if self._now() - push.started_at > _OLD_SECONDS:
            await self._begin_anew(push, {chunk for layout in layouts.values() for chunk in layout.chunks})
        await self._check_chunks(push, list(layouts.values()))
        await self._check_quota(push, layouts.values())
        for some in batches(list(layouts.values()), contents.NAMES_AT_ONCE):
            async with self.database.write() as session:
                await self._go_on(session, push)
                await checkpoints.record(session, push.scope, some, self.database.now())
        await self._publish(push, document, request)
        done = await self.requests.get(push_id, pusher.organisation, pusher.team)
        return done if is_reader else _unreadable(done)

    async def _committed(self, push_id: str, pusher: PushAccess, document: ManifestDocument) -> Mirror | None:
        """The push that has become this very checkpoint."""
        with suppress(NotFoundError):
            done = await self.requests.get(push_id, pusher.organisation, pusher.team)
            for part in done.sources[:1]:
                uri = parse_source(part.source)
                is_theirs = isinstance(uri, CheckpointUri) and pusher.may_push(uri)
                if is_theirs and done.status == "READY" and part.manifest == str(document.digest):
                    return done
        return None

    def _layouts(self, files: Sequence[PushedFile]) -> dict[str, FileLayout]:
        """In a thread: by path, in their order."""
        if len(files) > self.limit_files:
            raise LimitExceededError("files of the push", len(files), self.limit_files)
        try:
            found = {
                normalise_path(file.path): FileLayout.of(file.size, tuple(map(Digest.parse, file.chunks)))
                for file in files
            }
            if len(found) != len(files):
                raise UnsafePathError("a path stands twice")
            check_tree(found)
        except ValueError as error:  # an UnsafePathError is one
            raise InvalidRequestError(f"files: {error}") from error
        return dict(sorted(found.items()))

    def _now(self) -> float:
        """By the clock that is behind: this machine's dates files of the store, the database's dates rows."""
        return min(self.database.now(), time.time())

    async def _begin_anew(self, push: _Owned, chunks: Collection[Digest]) -> None:
        """Protect the push from collections again, and record the chunks that the store still holds again.

        The row is written first. A collection that read it before may still delete a chunk: then ``keep`` does not find that one. A collection
        that reads it later waits for the push.
        """
        now = self._now()
        async with self.database.write() as session:
            await self._go_on(session, push)
            await mirrors.begin_anew(session, push.id, now - _CLOCKS_SECONDS)
        push.started_at = now
        async with self.database.read() as session:
            sizes = await checkpoints.pushed_chunks(session, push.scope, chunks)
        for some in batches(list(sizes), contents.NAMES_AT_ONCE):
            kept = await asyncio.to_thread(self.store.keep, some)
            layouts = [FileLayout.of(sizes[chunk], (chunk,)) for chunk in some if chunk in kept]
            async with self.database.write() as session:
                await self._go_on(session, push)
                await checkpoints.record(session, push.scope, layouts, self.database.now())

    async def _check_chunks(self, push: _Owned, layouts: Sequence[FileLayout]) -> None:
        wanted = {chunk for layout in layouts for chunk in layout.chunks}
        async with self.database.read() as session:
            sizes = await checkpoints.pushed_chunks(session, push.scope, wanted, push.started_at)
        if missing := sorted(wanted - sizes.keys()):
            raise ChunksMissingError(len(missing), tuple(map(str, missing[:_NAMED_MISSING])))
        for layout in layouts:
            for chunk in layout.placed():
                if sizes[chunk.digest] != chunk.range.size:
                    raise InvalidRequestError(
                        f"chunk {chunk.digest} has {sizes[chunk.digest]} bytes, and is number {chunk.index} of a file of "
                        f"{layout.size}: all chunks but the last have {CHUNK_SIZE}"
                    )

    async def _check_quota(self, push: _Owned, layouts: Iterable[FileLayout]) -> None:
        if self.limit_bytes is None:
            return
        sizes = {layout.digest.hex: layout.size for layout in layouts}
        async with self.database.read() as session:
            needed = await checkpoints.bytes_with(session, push.scope, push.uri, sizes)
        if needed > self.limit_bytes:
            raise QuotaExceededError(needed, self.limit_bytes)

    async def _publish(self, push: _Owned, document: ManifestDocument, request: CommitRequest) -> None:
        organisation = push.scope.organisation
        async with self.database.write() as session:
            await self._go_on(session, push)
            draft = await contents.draft(session, document, self.database.now())
        for names in batches(split_digests(document.contents), contents.NAMES_AT_ONCE):
            async with self.database.write() as session:
                await self._go_on(session, push)
                _check_held(not await contents.add_names(session, draft, [name.hex() for name in names], organisation))
        async with self.database.write() as session:
            await mirrors.hold_claims(session)
            await self._go_on(session, push)
            now = self.database.now()
            _check_held(self._now() - push.started_at <= _LAST_SECONDS)
            _check_held(await contents.publish(session, draft, now, organisation))
            before = await checkpoints.put(session, push.scope, push.uri, _row(push, document, request, now))
            transferred = await mirrors.end_push(
                session,
                push.id,
                now=now,
                manifest=document.digest.hex,
                resolved_revision=f"{push.uri.job}/{push.uri.checkpoint}",
                files_total=document.files_total,
                bytes_total=document.bytes_total,
            )
            facts: dict[str, Fact] = {
                "mirror": push.id,
                "source": str(push.uri),
                "files": document.files_total,
                "transferred": transferred,
                "reused": max(0, document.bytes_total - transferred),
            }
            told = [events.event_of("pushed", facts, document.digest.hex, organisation=organisation)]
            if before is not None and before != push.id:
                gone = await checkpoints.drop_push(session, before)
                told += gone_events(organisation, str(push.uri), gone, "replaced")
            await events.record(session, now, told)

    async def forget(self, push_id: str, pusher: PushAccess) -> Mirror:
        """End a push that goes on. What was sent is collected as what nobody needs."""
        push = await self._get(push_id, pusher)
        async with self.database.write() as session:
            await mirrors.finish(session, push_id, "CANCELED", now=self.database.now())
            await mirrors.release_claims(session, PUSHED, push_id)
        self._forget(push)
        return await self.requests.get(push_id, pusher.organisation, pusher.team)

    async def _get(self, push_id: str, pusher: PushAccess | None) -> _Owned:
        """A push that this one (None: anybody) may go on with, as it was when this process looked; or ``NotFoundError``."""
        known = self._owned.get(push_id)
        # What is another's is looked for each time, as what does not exist is.
        if known is None or not known.is_of(pusher):
            known = await self._find(push_id, *((None, None) if pusher is None else (pusher.organisation, pusher.team)))
            while len(self._owned) >= _KNOWN:
                del self._owned[next(iter(self._owned))]
            known = self._owned.setdefault(push_id, known)
        if pusher is not None and not pusher.may_push(known.uri):
            raise _ended(push_id)
        return known

    async def _find(self, push_id: str, organisation: str | None, team: str | None) -> _Owned:
        try:
            async with self.database.read() as session:
                state = await mirrors.get(session, push_id, organisation, team)
        except NotFoundError:
            raise _ended(push_id) from None
        row = state.row
        if row.status != "SYNCING" or not mirrors.is_push(state):
            raise _ended(push_id, row)
        # Of all processes that put chunks the one whose clock is most behind counts: see ``mirrors.claim``.
        began = min(row.started_at or inf, time.time())
        async with self.database.write() as session:
            await mirrors.began_earlier(session, push_id, began)
        found = _Owned(push_id, PushScope(row.organisation, row.team), _named(state.sources[0].source), began)
        found.recorded = Batched(partial(self._record, found), contents.NAMES_AT_ONCE)
        found.reserved = Batched(partial(self._reserve, found), contents.NAMES_AT_ONCE)
        return found

    def _forget(self, push: _Owned) -> None:
        self._owned.pop(push.id, None)

    async def _go_on(self, session: WriteSession, push: _Owned) -> None:
        """Write in the name of a push that goes on from now on. ``NotFoundError``: it has ended meanwhile."""
        if not await mirrors.renew_claim(session, push.id, PUSHED, self.database.now() + GIVEN_UP_SECONDS):
            self._forget(push)
            raise _ended(push.id, await session.get(MirrorRow, push.id))

    def grant(self, request: PushGrantRequest, organisation: str, team: str | None = None) -> PushGrantDocument:
        """The right to push checkpoints of one rank of a job, of this team's project, and nothing else: what a job gets instead of a token."""
        job = parse_source(request.job)
        if not isinstance(job, CheckpointUri) or job.job is None or job.checkpoint is not None:
            raise InvalidSourceError(
                request.job, f"a grant to push is for a job, bt://project@job, not for {request.job!r}"
            )
        expires_at = time.time() + request.expires_seconds
        token = self.requests.signer.sign_push(PushGrant(organisation, job, expires_at, team))
        return PushGrantDocument(grant=token, job=str(job), expires_at=moment(expires_at))


def _unreadable(mirror: Mirror) -> Mirror:
    return mirror.model_copy(update={"grant": None})


def _counted_on(pusher: PushAccess, scope: PushScope) -> list[str | None]:
    """The teams of whose mirrors chunks need not be sent; None is all of the organisation.

    The bearer of a grant is a job. It reads nothing by itself: it counts on mirrors of its own team, and, if a caller without a
    team made the grant, on mirrors that such callers asked for.
    """
    if pusher.grant is None:
        return [pusher.team]
    return [scope.team] if pusher.team else [scope.team, mirrors.OF_ALL]


def _check_held(is_held: bool) -> None:
    if not is_held:
        raise StoreUnavailableError("some of the push was collected or found damaged meanwhile; commit again")


def _document(layouts: dict[str, FileLayout]) -> ManifestDocument:
    """In a thread, because a million files take seconds."""
    writer = ManifestWriter()
    writer.add([FileEntry(path, layout.size, layout.digest) for path, layout in layouts.items()])
    return writer.finish()


def _row(push: _Owned, document: ManifestDocument, request: CommitRequest, now: float) -> dict[str, object]:
    details = request.details
    written_at = min(now, details.created_at.timestamp()) if details.created_at else now
    return {
        "mirror": push.id,
        "manifest": document.digest.hex,
        "created_at": now,
        "committed_at": now,
        "files_total": document.files_total,
        "bytes_total": document.bytes_total,
        "is_loadable": is_loadable(details.checkpoint_type, [file.path for file in request.files]),
        "details": details.model_dump(mode="json", exclude={"created_at"}) | {"created_at": written_at},
    }


@dataclass(frozen=True)
class PushedChunks:
    """A ``ReceivedChunks``, whose methods run in the data plane's threads; what they ask of the database runs on ``loop``."""

    store: ChunkStore
    pushes: Pushes
    loop: asyncio.AbstractEventLoop

    def authorize(self, request: PushedChunk) -> str:
        """The organisation of the push, checked for this bearer."""
        return answer_of(self.loop, self.pushes.check(request.bearer, request.push))

    def take(self, request: PushedChunk, content: memoryview) -> None:
        """Durable when it returns, and the push counts on it."""
        reserved = answer_of(self.loop, self.pushes.reserve(request.push, request.digest, request.size))
        try:
            self.store.put(request.digest, content, writer=request.organisation)
        except BaseException:
            if reserved:
                answer_of(self.loop, self.pushes.release(request.push, reserved))
            raise
        answer_of(self.loop, self.pushes.record(request.push, request.digest, request.size))
