"""Pushes: mirrors whose bytes jobs send, chunk by chunk, and which become checkpoints.

A push is a running mirror without a worker, so it is listed, counted and canceled like every mirror. ``PUSHED`` claims
it while its client makes calls. After ``GIVEN_UP_SECONDS`` without a call a worker claims it, and it fails. The set of
a push refers to the chunks that were sent and to those that need not be sent. A commit makes another set, of the chunks
that it names. Sent chunks without references are collected; until then the team's next push finds them.

An upload (``bdn.mirror.jobs.archives``) is a push that gets its name and team with its commit.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from sqlalchemy.exc import IntegrityError

from bdn.core.chunk import Digest
from bdn.core.errors import (
    BdnError,
    ChunksMissingError,
    Fact,
    InvalidRequestError,
    InvalidSourceError,
    LimitExceededError,
    NotFoundError,
    QuotaExceededError,
    single_error,
)
from bdn.core.manifest import ManifestWriter, PlacedFile, Root
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.store import ChunkStore
from bdn.core.training.checkpoints import is_loadable, is_reserved
from bdn.mirror.access.access import Access, PushAccess
from bdn.mirror.access.callers import NotPermittedError
from bdn.mirror.chunks.writer import SetWriter, put_manifest
from bdn.mirror.db import checkpoints, chunks, events, manifests, mirrors, projects
from bdn.mirror.db.checkpoints import PushScope, Version
from bdn.mirror.db.chunks import SetEndedError
from bdn.mirror.db.database import Database, WriteSession, batches
from bdn.mirror.db.manifests import DocumentDamagedError
from bdn.mirror.db.mirrors import PUSH_MOUNT, PUSHED
from bdn.mirror.db.tables import MirrorRow
from bdn.mirror.db.waiting import answer_of
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.jobs.commits import check_slab, chunk_sizes, placed_files, slabs_of
from bdn.mirror.jobs.projects import gone_events
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.transfer.batching import Batched
from bdn.wire.access_schema import DEFAULT_TEAM
from bdn.wire.grants import PushGrant
from bdn.wire.mirror_schema import Mirror
from bdn.wire.push_schema import (
    CheckpointDetails,
    CommitRequest,
    CommittedPush,
    Push,
    PushGrantDocument,
    PushGrantRequest,
)
from bdn.wire.shapes import body_of, moment

_Answer = TypeVar("_Answer")
GIVEN_UP_SECONDS: Final = 3600.0
UPLOAD_BYTES: Final = 5 * 1024**3  # of one upload
_UPLOAD: Final = "upload:"  # the source of a push without a name, before its id
_NAMED_MISSING: Final = 10
_KNOWN: Final = 10_000  # pushes in ``_owned``
_CHUNKS_AT_ONCE: Final = 2000  # of one transaction
_SLABS_AT_ONCE: Final = 8  # of 8 MiB of memory each


def _named(source: str) -> CheckpointUri:
    """Parse the source of a push: one checkpoint of one job. Raises ``InvalidSourceError``."""
    uri = parse_source(source)
    if not isinstance(uri, CheckpointUri) or uri.job is None or uri.checkpoint is None:
        raise InvalidSourceError(
            source, f"a push is of one checkpoint of one job, bt://project@job/name, not of {source!r}"
        )
    return uri


def is_upload(source: str) -> bool:
    """Whether the source of a mirror is an upload's."""
    return source.startswith(_UPLOAD)


def new_push_id() -> str:
    return f"mir_{secrets.token_hex(12)}"


def _ended(push_id: str, row: MirrorRow | None = None) -> BdnError:
    """Why a push accepts no more calls: its quota failure, repeated to each call; otherwise ``NotFoundError``."""
    error = row.error if row else None
    if error and error["code"] == QuotaExceededError.code:
        return QuotaExceededError(**error["details"])
    return NotFoundError(f"an open push {push_id}")


@dataclass(eq=False, slots=True)
class OpenPush:
    """An open push: the scope of its project, its checkpoint (None: an upload), and its set.

    ``admitted`` counts the bytes of chunks before they are stored.
    """

    id: str
    scope: PushScope
    uri: CheckpointUri | None
    writer: SetWriter
    admitted: Batched[tuple[Digest, int], int] = field(init=False)

    @property
    def name(self) -> CheckpointUri:
        """Raises ``NotFoundError`` for an upload, which has no name."""
        if self.uri is None:
            raise _ended(self.id)
        return self.uri

    def is_of(self, pusher: PushAccess | None) -> bool:
        """Whether it belongs to the pusher's organisation and team; always for None."""
        return pusher is None or (
            pusher.organisation == self.scope.organisation and pusher.team in (None, self.scope.team)
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """What a push becomes: the checkpoint ``uri`` of these files, in a project of the scope's team."""

    scope: PushScope
    uri: CheckpointUri
    files: Sequence[PlacedFile]
    details: CheckpointDetails = field(default_factory=CheckpointDetails)


@dataclass
class Pushes:
    """The service behind ``/pushes``.

    ``limit_bytes`` limits an organisation's checkpoints together and, separately, the uncommitted bytes of its pushes.
    """

    database: Database
    store: ChunkStore
    access: Access
    requests: MirrorRequests
    threads: Executor  # read and write the store
    limit_files: int
    limit_bytes: int | None
    _owned: dict[str, OpenPush] = field(default_factory=dict)

    async def begin(self, source: str, pusher: PushAccess, data_port: int | None) -> Push:
        """Begin a push, or return the open push of the same checkpoint.

        Raises:
            NotPermittedError: the bearer's grant is for other checkpoints.
            InvalidSourceError, InvalidRequestError: the source is not one checkpoint of one job, or not of one team's
                project; or its name is reserved.
        """
        uri, organisation = _named(source), pusher.organisation
        if is_reserved(uri.checkpoint or ""):
            raise InvalidSourceError(source, "the name of a checkpoint must not begin with a dot")
        if not pusher.may_push(uri):
            raise NotPermittedError(f"this grant is limited to checkpoints of {pusher.grant and pusher.grant.job}")
        while True:
            async with self.database.read() as session:
                project = await projects.find(session, organisation, uri.project, pusher.team)
                team = project.team if project else pusher.team or DEFAULT_TEAM
                key = mirrors.push_key(str(uri), team)
                push_id = await mirrors.running(session, organisation, key)
            if push_id is not None:
                break
            fresh = new_push_id()
            try:
                await self._begin(fresh, str(uri), organisation, team)
            except IntegrityError:
                continue  # another request was faster
            push_id = fresh
        push = await self.get(push_id, pusher)
        async with self.database.write() as session:
            await self.renew(session, push)
        expires_at = moment(self.database.now() + GIVEN_UP_SECONDS)
        return Push(push_id=push_id, expires_at=expires_at, data_port=data_port)

    async def begin_upload(self, organisation: str, team: str | None) -> str:
        """Begin a push without a name. Returns its id."""
        push_id = new_push_id()
        await self._begin(push_id, f"{_UPLOAD}{push_id}", organisation, team or mirrors.OF_ALL)
        return push_id

    async def _begin(self, push_id: str, source: str, organisation: str, team: str) -> None:
        """Raises ``IntegrityError`` if a push of the same source is open."""
        request, key = {"source": source, "mount_location": PUSH_MOUNT}, mirrors.push_key(source, team)
        async with self.database.write() as session:
            now = self.database.now()
            await mirrors.insert(session, push_id, organisation, key, [request], now=now, team=team)
            await mirrors.begin_push(session, push_id, now, now + GIVEN_UP_SECONDS)

    async def committed(self, source: str, pusher: PushAccess) -> CommittedPush:
        """The push of a checkpoint's newest version, if this pusher may push the checkpoint. Raises ``NotFoundError``."""
        uri = _named(source)
        async with self.database.read() as session:
            found = await checkpoints.committed(session, pusher.organisation, pusher.team, uri)
        if found is None or not pusher.may_push(uri):
            raise NotFoundError(f"checkpoint {uri}")
        push_id, committed_at = found
        return CommittedPush(push_id=push_id, source=str(uri), committed_at=moment(committed_at))

    async def missing(self, push_id: str, pusher: PushAccess, wanted: Sequence[Digest]) -> list[Digest]:
        """The chunks that must be sent.

        The push now refers to all other chunks, which its team pushed or the pusher may read. A chunk of another team
        is reported as missing, like a chunk that does not exist.
        """
        push = await self.get(push_id, pusher)
        set_id, teams = push.writer.set_id, _counted_on(pusher, push.scope)
        async with self.database.read() as session:
            known = await checkpoints.known_chunks(session, push.scope, set_id, teams, wanted)
        async with self.database.write() as session:
            await self.renew(session, push)
            held = await chunks.of(session, chunks.hold, set_id, known)
        return [chunk for chunk in dict.fromkeys(wanted) if chunk not in held]

    async def check(self, bearer: str | None, push_id: str) -> str:
        """Authorize a bearer for a push. Returns the push's organisation.

        ``NotFoundError``: a foreign push, or an ended one.
        """
        pusher = await self.access.pusher(bearer)
        return (await self.get(push_id, None if pusher.is_operator else pusher)).scope.organisation

    async def admit(self, push_id: str, chunk: Digest, size: int) -> tuple[SetWriter, int]:
        """Count a chunk that arrived whole, before it is stored. Returns the writer for it, and the counted bytes.

        Raises ``QuotaExceededError`` if it exceeds the organisation's limit of uncommitted bytes. The push then fails,
        which frees its bytes for other pushes.
        """
        push = await self.get(push_id, None)
        try:
            return push.writer, await push.admitted.of((chunk, size))
        except QuotaExceededError as error:
            async with self.database.write() as session:
                await mirrors.finish(
                    session, push.id, "FAILED", now=self.database.now(), error=body_of(error).model_dump()
                )
            self._forget(push)
            raise

    async def _admit(self, push: OpenPush, came: Sequence[tuple[Digest, int]]) -> list[int]:
        async with self.database.write() as session:
            limit, uncommitted = self.limit_bytes, 0
            if limit is not None:
                uncommitted = await mirrors.hold_uncommitted(session, push.scope.organisation)
            await self.renew(session, push)
            stored = await chunks.of(session, chunks.stored, [digest for digest, _ in came], [push.writer.set_id])
            sizes = {digest: size for digest, size in came if digest not in stored}
            more = sum(sizes.values())
            if more and limit is not None and uncommitted + more > limit:
                raise QuotaExceededError(uncommitted + more, limit)
            if push.uri is None and (total := await mirrors.transferred(session, push.id) + more) > UPLOAD_BYTES:
                raise LimitExceededError("bytes of the upload", total, UPLOAD_BYTES)
            await mirrors.add_transferred(session, push.id, more)
            await checkpoints.record(session, push.scope, sizes)
        return [sizes.pop(digest, 0) for digest, _ in came]

    async def release(self, push_id: str, size: int) -> None:
        """Remove a chunk that was not stored from the count."""
        async with self.database.write() as session:
            await mirrors.add_transferred(session, push_id, -size)

    async def why_ended(self, push_id: str) -> BdnError:
        async with self.database.read() as session:
            return _ended(push_id, await session.get(MirrorRow, push_id))

    async def commit(
        self, push_id: str, pusher: PushAccess, request: CommitRequest, *, is_agent: bool = False
    ) -> Mirror:
        """Make the whole checkpoint visible. A repeated commit gets the same answer.

        A grant to push does not permit reading, so the answer to its bearer contains no grant to read; an agent gets
        one, because it stores the newest checkpoint of its job.

        Raises:
            ChunksMissingError: some chunks were not sent.
            InvalidRequestError: the files are not a tree, or the chunks do not make up the files.
            LimitExceededError, QuotaExceededError: too many files or bytes.
            NotFoundError: the push has ended otherwise.
        """
        files = await self._in_thread(placed_files, request.files, self.limit_files)
        is_reader = pusher.grant is None or is_agent
        if (done := await self._committed(push_id, pusher, files)) is not None:
            return done if is_reader else _unreadable(done)
        push = await self.get(push_id, pusher)
        await self.publish(push, Commit(push.scope, push.name, files, request.details))
        done = await self.requests.get(push_id, pusher.organisation, pusher.team)
        return done if is_reader else _unreadable(done)

    async def publish(self, push: OpenPush, commit: Commit) -> None:
        """Make the checkpoint visible, and end the push. Raises like ``commit``."""
        owner = f"{push.id}/{secrets.token_hex(6)}"  # of this commit: two concurrent commits of one push have two
        async with self.database.write() as session:
            await self.renew(session, push)
            set_id = await chunks.of(session, chunks.begin, owner)
        try:
            await self._hold(push, set_id, await self._in_thread(chunk_sizes, commit.files))
            await self._check_slabs(commit.files)
            writer = SetWriter(self.database, self.store, set_id, commit.scope.organisation)
            root = await self._in_thread(put_manifest, commit.files, writer.put)
            await self._check_quota(commit, set_id)
            await self._publish(push, commit, set_id, root)
        except SetEndedError:
            raise await self.why_ended(push.id) from None
        finally:
            async with self.database.write() as session:
                await chunks.of(session, chunks.end_of, owner, self.database.now())  # no-op once published

    async def _committed(self, push_id: str, pusher: PushAccess, files: Sequence[PlacedFile]) -> Mirror | None:
        """The push, if it has become exactly this checkpoint."""
        with suppress(NotFoundError):
            done = await self.requests.get(push_id, pusher.organisation, pusher.team)
            for part in done.sources[:1] if done.status == "READY" else ():
                uri = parse_source(part.source)
                is_theirs = isinstance(uri, CheckpointUri) and pusher.may_push(uri)
                if is_theirs and part.manifest == await self._in_thread(_manifest_of, files):
                    return done
        return None

    async def _hold(self, push: OpenPush, set_id: int, sizes: Mapping[Digest, int]) -> None:
        """Make the commit's set refer to these chunks of the push.

        Raises ``ChunksMissingError``, ``InvalidRequestError``.
        """
        missing: list[Digest] = []
        for some in batches(list(sizes), _CHUNKS_AT_ONCE):
            async with self.database.write() as session:
                await self.renew(session, push)
                sent = await chunks.of(session, chunks.stored, some, [push.writer.set_id])
                held = await chunks.of(session, chunks.hold, set_id, sent)
            missing += [digest for digest in some if digest not in held]
            for digest, size in held.items():
                if size != sizes[digest]:
                    raise InvalidRequestError(
                        f"files: chunk {digest} has {size} bytes; by the sizes of the files it has {sizes[digest]}"
                    )
        if missing:
            raise ChunksMissingError(len(missing), tuple(map(str, missing[:_NAMED_MISSING])))

    async def _check_slabs(self, files: Sequence[PlacedFile]) -> None:
        """Verify the digests of small files. ``ChunksMissingError``: the store lost a slab, which must be sent again."""
        slabs = await self._in_thread(slabs_of, files)
        left = iter(slabs.items())

        async def work() -> None:
            for slab, lies in left:
                try:
                    await self._in_thread(check_slab, self.store, slab, lies)
                except DocumentDamagedError as error:
                    async with self.database.write() as session:
                        await chunks.of(session, chunks.mark_damaged, slab, str(error), self.database.now())
                    raise ChunksMissingError(1, (str(slab),)) from error

        with single_error():
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_SLABS_AT_ONCE, len(slabs))):
                    group.create_task(work())

    async def _check_quota(self, commit: Commit, set_id: int) -> None:
        if self.limit_bytes is None:
            return
        async with self.database.read() as session:
            needed = await checkpoints.bytes_with(session, commit.scope, commit.uri, set_id)
        if needed > self.limit_bytes:
            raise QuotaExceededError(needed, self.limit_bytes)

    async def _in_thread(self, work: Callable[..., _Answer], *given: object) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(work, *given))

    async def _publish(self, push: OpenPush, commit: Commit, set_id: int, root: Root) -> None:
        async with self.database.write() as session:
            await self.renew(session, push)
            now = self.database.now()
            await manifests.publish(session, set_id, root, now)
            if push.uri is None:
                if not await projects.lock(session, commit.uri.project):  # ``record`` would create it
                    raise NotFoundError(f"project {commit.uri.project}")
                await mirrors.name_upload(session, push.id, str(commit.uri), commit.scope.team)
            await self.record(session, commit.scope, commit.uri, _version(push.id, commit, root, now))

    async def record(self, session: WriteSession, scope: PushScope, uri: CheckpointUri, version: Version) -> None:
        """Make this version of a checkpoint its newest, and the version's push READY. Its manifest is published."""
        push_id, name, now = version["mirror"], version["manifest"], version["committed_at"]
        files, size = version["files_total"], version["bytes_total"]
        await mirrors.lift_tombstone(session, scope.organisation, name)
        before = await checkpoints.put(session, scope, uri, version)
        transferred = await mirrors.end_push(
            session,
            push_id,
            now=now,
            manifest=name,
            resolved_revision=f"{uri.job}/{uri.checkpoint}",
            files_total=files,
            bytes_total=size,
        )
        facts: dict[str, Fact] = {
            "mirror": push_id,
            "source": str(uri),
            "files": files,
            "transferred": transferred,
            "reused": max(0, size - transferred),
        }
        told = [events.event_of("pushed", facts, name, organisation=scope.organisation)]
        if before is not None and before != push_id:
            gone = await checkpoints.drop_push(session, before)
            told += gone_events(scope.organisation, str(uri), gone, "replaced")
        await events.record(session, now, told)

    async def forget(self, push_id: str, pusher: PushAccess) -> Mirror:
        """Cancel an open push. Its chunks are collected once nothing else refers to them."""
        await self.cancel(await self.get(push_id, pusher))
        return await self.requests.get(push_id, pusher.organisation, pusher.team)

    async def cancel(self, push: OpenPush) -> None:
        async with self.database.write() as session:
            await mirrors.finish(session, push.id, "CANCELED", now=self.database.now())
            await mirrors.release_claims(session, PUSHED, push.id)
        self._forget(push)

    async def get(self, push_id: str, pusher: PushAccess | None) -> OpenPush:
        """An open push that ``pusher`` (None: any) may use, perhaps as cached. Raises ``NotFoundError``."""
        known = self._owned.get(push_id)
        # A foreign push is read from the database each time, like one that does not exist.
        if known is None or not known.is_of(pusher):
            known = await self._find(push_id, *((None, None) if pusher is None else (pusher.organisation, pusher.team)))
            while len(self._owned) >= _KNOWN:
                del self._owned[next(iter(self._owned))]
            known = self._owned.setdefault(push_id, known)
        if pusher is not None and not pusher.may_push(known.name):
            raise _ended(push_id)
        return known

    async def _find(self, push_id: str, organisation: str | None, team: str | None) -> OpenPush:
        try:
            async with self.database.read() as session:
                state = await mirrors.get(session, push_id, organisation, team)
                set_id = await chunks.of(session, chunks.filling, push_id)
        except NotFoundError:
            raise _ended(push_id) from None
        row = state.row
        if row.status != "SYNCING" or not mirrors.is_push(state) or set_id is None:
            raise _ended(push_id, row)
        writer, source = SetWriter(self.database, self.store, set_id, row.organisation), state.sources[0].source
        uri = None if is_upload(source) else _named(source)
        found = OpenPush(push_id, PushScope(row.organisation, row.team), uri, writer)
        found.admitted = Batched(partial(self._admit, found), _CHUNKS_AT_ONCE)
        return found

    def _forget(self, push: OpenPush) -> None:
        self._owned.pop(push.id, None)

    async def renew(self, session: WriteSession, push: OpenPush) -> None:
        """Renew the claim of a push before writing in its name. ``NotFoundError``: the push has ended meanwhile."""
        if not await mirrors.renew_claim(session, push.id, PUSHED, self.database.now() + GIVEN_UP_SECONDS):
            self._forget(push)
            raise _ended(push.id, await session.get(MirrorRow, push.id))

    def grant(self, request: PushGrantRequest, organisation: str, team: str | None = None) -> PushGrantDocument:
        """Let a job push checkpoints of one of its ranks, in this team's project, and nothing else. Replaces a token."""
        job = parse_source(request.job)
        if not isinstance(job, CheckpointUri) or job.job is None or job.checkpoint is not None:
            raise InvalidSourceError(
                request.job, f"a grant to push is for a job, bt://project@job, not for {request.job!r}"
            )
        expires_at = self.database.now() + request.expires_seconds
        token = self.requests.signer.sign(PushGrant(organisation, job, expires_at, team))
        return PushGrantDocument(grant=token, job=str(job), expires_at=moment(expires_at))


def _unreadable(mirror: Mirror) -> Mirror:
    return mirror.model_copy(update={"grant": None})


def _counted_on(pusher: PushAccess, scope: PushScope) -> list[str | None]:
    """The teams whose mirrors save sending their chunks again; None is the whole organisation.

    The bearer of a grant is a job and reads nothing by itself. It relies on mirrors of its own team and, if a caller
    without a team made the grant, on mirrors requested by such callers.
    """
    if pusher.grant is None:
        return [pusher.team]
    return [scope.team] if pusher.team else [scope.team, mirrors.OF_ALL]


def _manifest_of(files: Sequence[PlacedFile]) -> str:
    """Takes seconds for a million files: call in a thread."""
    writer = ManifestWriter()
    for file in files:
        deque(writer.add(file), 0)
    deque(writer.finish(), 0)
    return str(writer.root.digest)


def _version(push_id: str, commit: Commit, root: Root, now: float) -> Version:
    details = commit.details
    written_at = min(now, details.created_at.timestamp()) if details.created_at else now
    return {
        "mirror": push_id,
        "manifest": root.digest.hex,
        "created_at": now,
        "committed_at": now,
        "files_total": root.files_total,
        "bytes_total": root.bytes_total,
        "is_loadable": is_loadable(details.checkpoint_type, [file.path for file in commit.files]),
        "details": details.model_dump(mode="json", exclude={"created_at"}) | {"created_at": written_at},
    }


@dataclass(frozen=True)
class PushedChunks:
    """A ``ReceivedChunks``: its methods run in the data plane's threads, and their database queries on ``loop``."""

    pushes: Pushes
    loop: asyncio.AbstractEventLoop

    def authorize(self, request: PushedChunk) -> str:
        return answer_of(self.loop, self.pushes.check(request.bearer, request.push))

    def take(self, request: PushedChunk, content: memoryview) -> None:
        """On return, the chunk is durable and the push refers to it."""
        writer, counted = answer_of(self.loop, self.pushes.admit(request.push, request.digest, request.size))
        try:
            writer.put(request.digest, content)
        except BaseException as error:
            if counted:
                answer_of(self.loop, self.pushes.release(request.push, counted))
            if isinstance(error, SetEndedError):
                raise answer_of(self.loop, self.pushes.why_ended(request.push)) from None
            raise
