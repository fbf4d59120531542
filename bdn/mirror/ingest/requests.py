"""Requests of callers: start or join a mirror, plan, watch and cancel it."""

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from sqlalchemy.exc import IntegrityError

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import LimitExceededError, NotFoundError
from bdn.core.source.upstream import Source
from bdn.core.source.uri import HuggingFaceUri, SourceUri, WeightsSource, normalise_mount
from bdn.mirror.db import manifests, mirrors
from bdn.mirror.db.database import Cursor, Database
from bdn.mirror.db.mirrors import MirrorState
from bdn.mirror.db.recall import is_alike
from bdn.mirror.db.tables import MirrorSourceRow
from bdn.mirror.db.waiting import SharedRead, SharedReads
from bdn.mirror.ingest.progress import CopyProgress
from bdn.mirror.ingest.survey import Survey, Surveyor
from bdn.mirror.ingest.trees import CommitTrees
from bdn.mirror.ingest.worker import published_before
from bdn.traces import spans
from bdn.wire.grants import LONGEST_GRANT, Grant, GrantedMount, GrantSigner, GrantVerifier
from bdn.wire.mirror_schema import RECORDED, TERMINAL, HubFile, Mirror, MirrorSource, Plan, PlannedSource, body_from
from bdn.wire.progress import total_of

_OLD_SECONDS: Final = 0.4  # age limit of a shared read: less than the time between two reads of a waiter

_ANY: Final = Digest("0" * 64)  # as long as any other digest
_ANY_COMMIT: Final = "0" * 40
_ANY_MIRROR: Final = f"mir_{'0' * 24}"

_SUMS: Final = ("files_total", "bytes_total", "bytes_transferred", "bytes_under_way", "bytes_reused")

# What is requested, and the organisation and team that request it: they decide what the answer contains.
Question = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True)
class HeldSource:
    """A source that was mirrored before, and a grant for its content then."""

    source: MirrorSource
    mirrored_at: float
    grant: str


@dataclass(frozen=True)
class MirrorRequests:
    """The service behind ``/mirror``. ``at_work`` contains the mirrors that this process works on.

    With ``team`` None, a method covers the whole organisation.
    """

    database: Database
    surveyor: Surveyor
    signer: GrantSigner
    grant_seconds: int
    at_work: Mapping[str, CopyProgress]
    watched: SharedReads[Question, Mirror] = field(default_factory=partial(SharedReads, _OLD_SECONDS))
    asked: SharedReads[Question, Mirror] = field(default_factory=partial(SharedReads, 0.0))

    async def request(self, sources: Sequence[WeightsSource], organisation: str, team: str | None = None) -> Mirror:
        """A new mirror, or the running mirror for the same request; without sources, a READY one.

        ``LimitExceededError``: its grant would be too long.
        """
        self.check(sources, organisation, team)
        bodies = [body_from(source).model_dump(exclude_none=True) for source in sources]
        asked = bodies if team is None else [team, *bodies]
        request_key = digest_of(json.dumps(asked, sort_keys=True).encode()).hex
        request = partial(self._request, bodies, organisation, team, request_key, spans.traceparent())
        # Of a thousand equal concurrent requests, two query the database.
        return await self.asked.of((request_key, organisation, team), request).get()

    def check(self, sources: Sequence[WeightsSource], organisation: str, team: str | None = None) -> None:
        """Reject what could never be mirrored or read. Raises ``CallerError``."""
        self._check_grant(sources, organisation, team)
        for source in sources:
            self.surveyor.check(source, organisation)

    def _check_grant(self, sources: Sequence[WeightsSource], organisation: str, team: str | None) -> None:
        """Reject what could be mirrored but not read: the grant names all mounts and must fit into a request header."""
        mounts = tuple(GrantedMount.at(one.mount_location, _ANY, str(one.source), _ANY_COMMIT) for one in sources)
        expires_at = self.database.now() + self.grant_seconds
        size = len(self.signer.sign(Grant(organisation, mounts, expires_at, team, _ANY_MIRROR)))
        if size > LONGEST_GRANT:
            what = (
                f"bytes of the grant for {len(mounts)} sources (send fewer sources at once, or shorter mount locations)"
            )
            raise LimitExceededError(what, size, LONGEST_GRANT)

    async def _request(
        self,
        bodies: list[dict[str, object]],
        organisation: str,
        team: str | None,
        request_key: str,
        traceparent: str | None,
    ) -> Mirror:
        while True:
            async with self.database.read() as session:
                mirror_id = await mirrors.running(session, organisation, request_key)
            if mirror_id is None:
                mirror_id = f"mir_{secrets.token_hex(12)}"
                try:
                    async with self.database.write() as session:
                        now = self.database.now()
                        given = mirror_id, organisation, request_key, bodies
                        await mirrors.insert(session, *given, now=now, team=team, traceparent=traceparent)
                        if not bodies:  # nothing for a worker to do
                            await mirrors.finish(session, mirror_id, "READY", now=now)
                except IntegrityError:
                    continue  # another caller was faster with the same request
            return await self.get(mirror_id, organisation, team)

    async def held(self, wanted: WeightsSource, organisation: str, *, is_newest: bool) -> HeldSource | None:
        """What the mirror holds of a commit or, with ``is_newest``, of any source as mirrored last.

        Sends no request upstream, so the caller's access there is not checked: for one user's own mirror, not for a
        service.
        """
        commit = wanted.source.commit if isinstance(wanted.source, HuggingFaceUri) else None
        async with self.database.read() as session:
            row = await published_before(session, organisation, wanted, commit, is_newest=is_newest)
            if row is None or row.manifest is None:
                return None
            mirror = (await mirrors.get(session, row.mirror_id, organisation)).row
        await manifests.note_use(self.database, row.manifest, self.database.now())
        mount = GrantedMount.at(wanted.mount_location, Digest(row.manifest), str(wanted.source), row.resolved_revision)
        grant = self.signer.sign(Grant(organisation, (mount,), self.database.now() + self.grant_seconds))
        return HeldSource(_source_of(row), mirror.completed_at or mirror.created_at, grant)

    async def is_update(self, manifest: str, wanted: WeightsSource, organisation: str) -> bool:
        """Whether the manifest, as hex, was at some time the content of the same source with the same patterns."""
        async with self.database.read() as session:
            rows = await mirrors.published_as(session, organisation, manifest)
        return any(is_alike(row.request, wanted) for row in rows)

    @property
    def trees(self) -> CommitTrees:
        return CommitTrees(self.database, self.surveyor)

    async def tree(self, source: SourceUri, organisation: str, *, is_held: bool) -> list[HubFile]:
        """All files of a mirrored commit, see ``CommitTrees.page``."""
        files: list[HubFile] = []
        cursor: str | None = "0"
        while cursor is not None:
            page = await self.trees.page(source, organisation, None, int(cursor), is_held=is_held)
            files += page.items
            cursor = page.next_cursor
        return files

    async def plan(self, sources: Sequence[WeightsSource], organisation: str, team: str | None = None) -> Plan:
        """What mirroring the sources would do now. Writes nothing."""
        self._check_grant(sources, organisation, team)
        planned: list[PlannedSource] = []
        counted: set[str] = set()
        for wanted in sources:
            async with self.surveyor.open(wanted, organisation, team=team) as source:
                survey = await self._survey(wanted, source, organisation)
            planned.append(_planned(wanted, survey, counted))
            if len(planned) < len(sources):  # the last source's keys, which may be a million, are not needed
                counted |= survey.lacking.keys()
        return Plan(
            sources=planned,
            files=sum(source.files for source in planned),
            bytes=sum(source.bytes for source in planned),
            bytes_to_transfer=sum(source.bytes_to_transfer for source in planned),
            bytes_reused=sum(source.bytes_reused for source in planned),
        )

    async def foresee(self, wanted: WeightsSource, organisation: str) -> tuple[PlannedSource, Survey]:
        """One source's part of a plan, and its survey. Writes nothing."""
        async with self.surveyor.open(wanted, organisation) as source:
            survey = await self._survey(wanted, source, organisation)
        return _planned(wanted, survey, set()), survey

    async def _survey(self, wanted: WeightsSource, source: Source, organisation: str) -> Survey:
        return await self.surveyor.survey(wanted, source, before=partial(self.surveyor.before, wanted, organisation))

    async def get(self, mirror_id: str, organisation: str, team: str | None = None) -> Mirror:
        """The mirror now. ``NotFoundError`` also for another organisation's or another team's."""
        return self._now(await self._recorded(mirror_id, organisation, team))

    async def _recorded(self, mirror_id: str, organisation: str, team: str | None) -> Mirror:
        async with self.database.read() as session:
            found = await mirrors.get(session, mirror_id, organisation, team)
        return (await self._documents([found], organisation))[0]

    def _now(self, recorded: Mirror) -> Mirror:
        """Add bytes that arrived since the last write, if this process runs the mirror.

        The database gets only whole chunks, in batches.
        """
        progress = self.at_work.get(recorded.id)
        if progress is None or recorded.status != "SYNCING":
            return recorded
        sources = [
            source.model_copy(update={"bytes_under_way": progress.bytes_under_way(position, source.bytes_transferred)})
            for position, source in enumerate(recorded.sources)
        ]
        under_way = sum(source.bytes_under_way for source in sources)
        return recorded.model_copy(update={"sources": sources, "bytes_under_way": under_way})

    async def page(
        self,
        organisation: str,
        status: str | None,
        source: str | None,
        before: Cursor | None,
        limit: int,
        *,
        team: str | None = None,
    ) -> tuple[list[Mirror], Cursor | None]:
        """Mirrors, newest first, and the cursor of the next page (None on the last one)."""
        async with self.database.read() as session:
            found, following = await mirrors.page(
                session, organisation, team=team, status=status, source=source, before=before, limit=limit
            )
        return [self._now(mirror) for mirror in await self._documents(found, organisation)], following

    async def wait(
        self, mirror_id: str, organisation: str, seconds: float, team: str | None = None, *, mount: str | None = None
    ) -> Mirror:
        """The mirror, once it is in a terminal state or the time is over; with ``mount`` only what is mounted there.

        Raises ``NotFoundError``: no such mirror, or no source of it has this mount location.
        """
        read = partial(self._recorded, mirror_id, organisation, team)
        mirror = await self.asked.of((mirror_id, organisation, team), read).get()
        if seconds and mirror.status not in TERMINAL:
            look, watch = self._watched(mirror_id, organisation, team), self.database.watch
            mirror = await watch.look_until(mirror_id, look.get, lambda seen: seen.status in TERMINAL, seconds)
        return self._now(mirror) if mount is None else self._only(self._now(mirror), normalise_mount(mount))

    def _only(self, mirror: Mirror, mount: str) -> Mirror:
        """The mirror with the bytes, the source and the grant of one mount location."""
        source = next((one for one in mirror.sources if one.mount_location == mount), None)
        if source is None:
            raise NotFoundError(f"mount location {mount} in mirror {mirror.id}")
        sums = {name: getattr(source, name) for name in _SUMS}
        grant = mirror.grant
        if grant is not None:
            whole = GrantVerifier(self.signer.public_keys).verify_as(Grant, grant, now=self.database.now())
            mounts = tuple(one for one in whole.mounts if one.mount_location == mount)
            grant = self.signer.sign(replace(whole, mounts=mounts))
        return mirror.model_copy(update={**sums, "sources": [source], "grant": grant})

    async def follow(
        self, mirror_id: str, organisation: str, interval_seconds: float, team: str | None = None
    ) -> AsyncGenerator[Mirror]:
        """Yield the mirror at least once per interval, the last time in a terminal state."""
        watch = self.database.watch
        topic, look = watch.topic(mirror_id), self._watched(mirror_id, organisation, team)
        changes = topic.changes
        mirror = await look.get()
        while mirror.status not in TERMINAL and not watch.stopping:
            yield self._now(mirror)
            await topic.changed(changes, interval_seconds)
            changes = topic.changes
            mirror = await look.get()
        yield self._now(mirror)

    def _watched(self, mirror_id: str, organisation: str, team: str | None) -> SharedRead[Mirror]:
        """The read that all watchers share until the mirror changes or the read is too old."""
        read = partial(self._recorded, mirror_id, organisation, team)
        return self.watched.of((mirror_id, organisation, team), read, self.database.watch.topic(mirror_id))

    async def cancel(self, mirror_id: str, organisation: str, team: str | None = None) -> Mirror:
        """Cancel a running mirror. Stored chunks stay and are not fetched again."""
        await self.get(mirror_id, organisation, team)
        async with self.database.write() as session:
            await mirrors.finish(session, mirror_id, "CANCELED", now=self.database.now())
        return await self.get(mirror_id, organisation, team)

    async def _documents(self, found: Sequence[MirrorState], organisation: str) -> list[Mirror]:
        ready = [source for state in found if state.row.status == "READY" for source in state.sources]
        async with self.database.read() as session:
            held = (
                await mirrors.readable(session, organisation, sorted({str(source.manifest) for source in ready}))
            ).keys()
        return [self._document(state, held) for state in found]

    def _document(self, state: MirrorState, held: AbstractSet[str]) -> Mirror:
        row, sources = state.row, state.sources
        bytes_total = total_of([source.bytes_total for source in sources])
        transferred = sum(source.bytes_transferred for source in sources)
        reused = sum(source.bytes_reused for source in sources)
        rate = None
        if row.started_at is not None and transferred:
            rate = transferred / max(0.001, (row.completed_at or self.database.now()) - row.started_at)
        left = None if bytes_total is None else max(0, bytes_total - transferred - reused)
        return Mirror.model_validate(
            {
                "id": row.id,
                "status": row.status,
                "created_at": row.created_at,
                "started_at": row.started_at,
                "completed_at": row.completed_at,
                "files_total": total_of([source.files_total for source in sources]),
                "bytes_total": bytes_total,
                "bytes_transferred": transferred,
                "bytes_reused": reused,
                "bytes_per_second": rate,
                "eta_seconds": left / rate if left is not None and rate and row.status == "SYNCING" else None,
                "grant": self._grant(state, held) if row.status == "READY" else None,
                "error": row.error,
                "sources": [_source_of(source) for source in sources],
            }
        )

    def _grant(self, state: MirrorState, held: AbstractSet[str]) -> str | None:
        """Signed anew for each read, never stored.

        None if a manifest is not readable any more: it could not be delivered.
        """
        if not all(source.manifest in held for source in state.sources):
            return None
        mounts = tuple(
            GrantedMount.at(source.mount_location, Digest(source.manifest), source.source, source.resolved_revision)
            for source in state.sources
            if source.manifest
        )
        row, expires_at = state.row, self.database.now() + self.grant_seconds
        return self.signer.sign(Grant(row.organisation, mounts, expires_at, row.team or None, row.id))


async def prune(database: Database, keep_seconds: float) -> None:
    """Delete mirrors that ended longer ago than this, in batches. Manifests stay readable."""
    pruned = True
    while pruned:
        async with database.write() as session:
            pruned = await mirrors.prune(session, database.now() - keep_seconds) > 0


def _source_of(row: MirrorSourceRow) -> MirrorSource:
    fields = {name: getattr(row, name) for name in RECORDED}
    return MirrorSource.model_validate(fields | {"manifest": row.manifest and f"b3:{row.manifest}"})


def _planned(wanted: WeightsSource, survey: Survey, counted: set[str]) -> PlannedSource:
    """One source's part of the plan. Bytes of an earlier source of the same request are not counted again."""
    missing = sum(size for key, size in survey.lacking.items() if key not in counted)
    return PlannedSource(
        source=str(wanted.source),
        mount_location=wanted.mount_location,
        resolved_revision=survey.resolution.revision,
        files=len(survey.files),
        bytes=survey.bytes_total,
        bytes_to_transfer=missing,
        bytes_reused=survey.bytes_total - missing,
        warnings=list(survey.warnings),
    )
