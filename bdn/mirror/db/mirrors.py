"""Every statement about mirrors, their sources, and the manifests that organisations gave up.

A manifest belongs to every organisation that mirrored it. An organisation with a tombstone for a manifest has *given it
up*. What is collected when all organisations gave it up is in ``collection``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.orm import InstrumentedAttribute, aliased

from bdn.core.chunk import digest_in, digest_of
from bdn.core.errors import NotFoundError
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.mirror.db import chunks
from bdn.mirror.db.database import (
    Cursor,
    ReadSession,
    WriteSession,
    batches,
    changed,
    changed_past_orm,
    delete_in,
    insert_new,
    newest,
    select_in,
    tell,
)
from bdn.mirror.db.tables import (
    HoldingRow,
    Json,
    ManifestRow,
    MirrorRow,
    MirrorSourceRow,
    TombstoneRow,
)
from bdn.mirror.db.waiting import JOBS_CHANGED, NEW_WORK, cancel_topic

RUNNING = ("PENDING", "SYNCING")
OF_ALL: Final = ""  # the ``team`` of a mirror that a caller without a team requested
PUSH_MOUNT: Final = "/checkpoint"  # in the grant of a push itself
PUSHED: Final = "push"  # claims a mirror whose bytes its caller sends: see ``bdn.mirror.jobs.pushes``
# A column, or a parameter of the statement.
_Name = InstrumentedAttribute[str] | InstrumentedAttribute[str | None] | BindParameter[str]


@dataclass(frozen=True, slots=True)
class MirrorState:
    """A mirror and its sources, in the order of the request."""

    row: MirrorRow
    sources: list[MirrorSourceRow]


async def insert(
    session: WriteSession,
    mirror_id: str,
    organisation: str,
    request_key: str,
    requests: Sequence[Json],
    *,
    now: float,
    team: str | None = None,
    traceparent: str | None = None,
) -> None:
    """Insert a mirror with a source for each request (``WeightsSourceBody``).

    Raises ``IntegrityError`` if a mirror for the same request runs already.
    """
    row = {"id": mirror_id, "organisation": organisation, "team": team or OF_ALL, "request_key": request_key}
    session.add(MirrorRow(**row, status="PENDING", created_at=now, traceparent=traceparent))
    await session.flush()
    for position, request in enumerate(requests):
        source = MirrorSourceRow(
            mirror_id=mirror_id,
            organisation=organisation,
            position=position,
            request=request,
            source=request["source"],
            mount_location=request["mount_location"],
            status="PENDING",
            warnings=[],
        )
        session.add(source)
    tell(session, NEW_WORK)


async def running(session: ReadSession, organisation: str, request_key: str) -> str | None:
    """The id of the running mirror for this request."""
    query = select(MirrorRow.id).where(
        MirrorRow.organisation == organisation, MirrorRow.request_key == request_key, MirrorRow.status.in_(RUNNING)
    )
    return (await session.execute(query)).scalar()


async def get(session: ReadSession, mirror_id: str, organisation: str | None, team: str | None = None) -> MirrorState:
    """A mirror of this organisation and team; of any organisation if it is None, for the worker.

    Raises ``NotFoundError`` for missing and for foreign mirrors alike, at the same cost (no oracle).
    """
    query = select(MirrorRow).where(MirrorRow.id == mirror_id)
    if organisation is not None:
        query = query.where(MirrorRow.organisation == organisation)
    if team is not None:
        query = query.where(MirrorRow.team == team)
    mirror = (await session.execute(query)).scalar()
    if mirror is None:
        raise NotFoundError(f"mirror {mirror_id}")
    return MirrorState(mirror, (await _sources(session, [mirror_id]))[mirror_id])


async def page(
    session: ReadSession,
    organisation: str,
    *,
    team: str | None = None,
    status: str | None,
    source: str | None,
    before: Cursor | None,
    limit: int,
) -> tuple[list[MirrorState], Cursor | None]:
    """Mirrors, newest first, and the cursor of the next page."""
    query = select(MirrorRow).where(MirrorRow.organisation == organisation)
    if team is not None:
        query = query.where(MirrorRow.team == team)
    if status:
        query = query.where(MirrorRow.status == status)
    if source:
        query = query.where(exists().where(MirrorSourceRow.mirror_id == MirrorRow.id, MirrorSourceRow.source == source))
    mirrors, following = await newest(session, query, (MirrorRow.created_at, MirrorRow.id), before, limit)
    sources = await _sources(session, [mirror.id for mirror in mirrors])
    return [MirrorState(mirror, sources[mirror.id]) for mirror in mirrors], following


@dataclass(frozen=True, slots=True)
class MirrorOwner:
    """The organisation that requested a mirror, and the team of it, or ``OF_ALL``."""

    organisation: str
    team: str


_OWNERS: Final = select(MirrorRow.id, MirrorRow.organisation, MirrorRow.team)


async def owners(session: ReadSession, mirror_ids: Collection[str]) -> dict[str, MirrorOwner]:
    """Of the mirrors that exist, in one statement also if there are none to look up."""
    found = select_in(session, _OWNERS, MirrorRow.id, sorted(mirror_ids) or [""])
    return {mirror_id: MirrorOwner(organisation, team) async for mirror_id, organisation, team in found}


async def _sources(session: ReadSession, mirror_ids: Sequence[str]) -> dict[str, list[MirrorSourceRow]]:
    query = select(MirrorSourceRow).where(MirrorSourceRow.mirror_id.in_(mirror_ids)).order_by(MirrorSourceRow.position)
    found: dict[str, list[MirrorSourceRow]] = {mirror_id: [] for mirror_id in mirror_ids}
    for row in (await session.execute(query)).scalars():
        found[row.mirror_id].append(row)
    return found


async def claim(
    session: WriteSession,
    claimant: str,
    *,
    now: float,
    until: float,
    after: str = "",
    only_idle: bool = False,
) -> tuple[str, str] | None:
    """Claim a free mirror of the organisation with the fewest mirrors at work.

    Returns the mirror's id and organisation.

    Among several such organisations the next one in name order has its turn; of its mirrors the oldest is claimed.

    Args:
        after: the organisation that had the last turn. Without turns, three organisations that refill their queues
            would keep a fourth from two slots: each is the oldest again whenever one of its mirrors ends.
        only_idle: skip organisations that have a claimed mirror, even if that claim has expired.
    """
    free = or_(MirrorRow.claim_expires_at.is_(None), MirrorRow.claim_expires_at < now)
    # A push holds its claim without a worker, so it does not count.
    at_work = (
        select(
            MirrorRow.organisation,
            func.count().label("claimed"),
            func.sum(case((MirrorRow.claim_expires_at >= now, 1), else_=0)).label("running"),
        )
        .where(MirrorRow.status == "SYNCING", MirrorRow.claimed_by != PUSHED)
        .group_by(MirrorRow.organisation)
        .subquery()
    )
    share = func.coalesce(at_work.c.running, 0)
    allowed = [at_work.c.claimed.is_(None)] if only_idle else []
    candidate = (
        select(MirrorRow.id)
        .outerjoin(at_work, at_work.c.organisation == MirrorRow.organisation)
        .where(MirrorRow.status.in_(RUNNING), free, *allowed)
        .order_by(
            share, case((MirrorRow.organisation > after, 0), else_=1), MirrorRow.organisation, MirrorRow.created_at
        )
        .limit(1)
        .with_for_update(skip_locked=True, of=MirrorRow)  # PostgreSQL cannot lock rows of an aggregate
        .correlate(None)
        .scalar_subquery()
    )
    statement = (
        update(MirrorRow)
        .where(MirrorRow.id == candidate)
        .values(claimed_by=claimant, claim_expires_at=until, status="SYNCING")
        .values(started_at=func.coalesce(MirrorRow.started_at, now))
        .returning(MirrorRow.id, MirrorRow.organisation)
        .execution_options(synchronize_session=False)
    )
    claimed = (await session.execute(statement)).one_or_none()
    if claimed is None:
        return None
    mirror_id, organisation = claimed
    tell(session, mirror_id)
    return mirror_id, organisation


_RENEW: Final = (
    update(MirrorRow)
    .where(
        MirrorRow.id == bindparam("mirror"),
        MirrorRow.claimed_by == bindparam("claimant"),
        MirrorRow.status == "SYNCING",
    )
    .values(claim_expires_at=bindparam("until"))
)


async def renew_claim(session: WriteSession, mirror_id: str, claimant: str, until: float) -> bool:
    """Renew the claim. Returns False if another worker took it or the mirror was canceled."""
    return await changed_past_orm(session, _RENEW, mirror=mirror_id, claimant=claimant, until=until) == 1


async def is_claimed(session: WriteSession, mirror_id: str, claimant: str, *, canceled_too: bool = False) -> bool:
    """Whether the mirror runs and this claimant may write for it. No other worker can claim the mirror until commit."""
    statuses = ("SYNCING", "CANCELED") if canceled_too else ("SYNCING",)
    query = select(MirrorRow.id).where(
        MirrorRow.id == mirror_id, MirrorRow.claimed_by == claimant, MirrorRow.status.in_(statuses)
    )
    return (await session.execute(query.with_for_update())).scalar() is not None


async def release_claims(session: WriteSession, worker: str | None = None, mirror_id: str | None = None) -> None:
    """Release the claims of a worker, or of all workers (None: only when no worker runs), or only one mirror's claim.

    A worker's claims equal its name or begin with ``{worker}:``.
    """
    statement = update(MirrorRow).where(MirrorRow.claimed_by.is_not(None))
    if mirror_id is not None:
        statement = statement.where(MirrorRow.id == mirror_id)
    if worker is None:
        statement = statement.where(MirrorRow.claimed_by != PUSHED)
    else:
        own = or_(MirrorRow.claimed_by == worker, MirrorRow.claimed_by.startswith(f"{worker}:", autoescape=True))
        statement = statement.where(own)
    if await changed(session, statement.values(claimed_by=None, claim_expires_at=None)):
        tell(session, NEW_WORK)


async def finish(session: WriteSession, mirror_id: str, status: str, *, now: float, error: Json | None = None) -> bool:
    """End a running mirror and the sets that it fills. Returns False if it has ended already.

    A canceled mirror keeps its claim until its worker has reported how much it copied.
    """
    values: dict[str, Any] = {"status": status, "completed_at": now, "error": error}
    if status != "CANCELED":
        values |= {"claimed_by": None, "claim_expires_at": None}
    statement = update(MirrorRow).where(MirrorRow.id == mirror_id, MirrorRow.status.in_(RUNNING)).values(**values)
    if await changed(session, statement) == 0:
        return False
    await chunks.of(session, chunks.end_of, mirror_id, now)
    sources = update(MirrorSourceRow).where(MirrorSourceRow.mirror_id == mirror_id, MirrorSourceRow.status.in_(RUNNING))
    await session.execute(sources.values(status=status, error=error))
    tell(session, mirror_id)
    tell(session, JOBS_CHANGED)
    if status == "CANCELED":
        tell(session, cancel_topic(mirror_id))
    return True


async def update_source(session: WriteSession, mirror_id: str, position: int, **values: Any) -> None:  # noqa: ANN401
    statement = update(MirrorSourceRow).where(
        MirrorSourceRow.mirror_id == mirror_id, MirrorSourceRow.position == position
    )
    await session.execute(statement.values(**values))
    tell(session, mirror_id)


async def recalled(session: ReadSession, organisation: str, key: str) -> list[MirrorSourceRow]:
    """For each manifest published under this key that the organisation may read: a source that it was published for.

    Usually there is one manifest, whatever the number of mirrors: three index lookups.
    """
    published = select(func.min(MirrorSourceRow.manifest)).where(MirrorSourceRow.recall_key == key)
    found: list[MirrorSourceRow] = []
    manifest = ""
    while manifest := (await session.execute(published.where(MirrorSourceRow.manifest > manifest))).scalar() or "":
        if await may_read(session, organisation, manifest):
            query = select(MirrorSourceRow).where(
                MirrorSourceRow.recall_key == key, MirrorSourceRow.manifest == manifest
            )
            found += (await session.execute(query.limit(1))).scalars()
    return found


async def published_as(session: ReadSession, organisation: str, manifest: str) -> list[MirrorSourceRow]:
    """The sources that were READY with this manifest, newest first."""
    return await _ready(session, organisation, MirrorSourceRow.manifest == manifest)


async def ready_from(session: ReadSession, organisation: str, source: str) -> list[MirrorSourceRow]:
    """The READY sources that were requested by this name, newest first."""
    return await _ready(session, organisation, MirrorSourceRow.source == source)


async def ready_at(
    session: ReadSession, organisation: str, team: str | None, repository: str, commit: str
) -> list[MirrorSourceRow]:
    """The READY sources of this commit of a repository, whatever revision and patterns were requested, newest first."""
    name = MirrorSourceRow.source
    is_repository = or_(name == repository, name.startswith(f"{repository}@", autoescape=True))
    is_team = true() if team is None else MirrorRow.team == team
    wanted = and_(is_repository, MirrorSourceRow.resolved_revision == commit, is_team)
    return await _ready(session, organisation, wanted)


async def named_beside(
    session: ReadSession, organisation: str, names: Sequence[str], sources: Collection[tuple[str, int]]
) -> set[str]:
    """Those of these manifests that READY sources of the organisation have, beside the given ones."""
    query = select(MirrorSourceRow.manifest, MirrorSourceRow.mirror_id, MirrorSourceRow.position).where(
        MirrorSourceRow.organisation == organisation,
        MirrorSourceRow.manifest.in_(names),
        MirrorSourceRow.status == "READY",
    )
    rows = (await session.execute(query)).all()
    return {str(manifest) for manifest, mirror_id, position in rows if (mirror_id, position) not in sources}


async def revisions(session: ReadSession, organisation: str, repository: str) -> dict[str, str]:
    """The commit that each revision of a repository named when it was mirrored last; "" is the default branch."""
    name = MirrorSourceRow.source
    rows = await _ready(
        session, organisation, or_(name == repository, name.startswith(f"{repository}@", autoescape=True))
    )
    found: dict[str, str] = {}
    for row in rows:
        if row.resolved_revision:
            found.setdefault(row.source.partition("@")[2], row.resolved_revision)
    return found


async def _ready(session: ReadSession, organisation: str, wanted: ColumnElement[bool]) -> list[MirrorSourceRow]:
    query = (
        select(MirrorSourceRow)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .join(ManifestRow, ManifestRow.digest == MirrorSourceRow.manifest)
        .where(
            ~is_given_up(organisation, ManifestRow.digest),
            MirrorSourceRow.organisation == organisation,
            wanted,
            MirrorSourceRow.status == "READY",
        )
        .order_by(MirrorRow.created_at.desc())
    )
    return list((await session.execute(query)).scalars())


async def prune(session: WriteSession, before: float) -> int:
    """Delete some mirrors that ended before then. Returns how many.

    For a published manifest the newest mirror stays per organisation, team, source and recall key, and the newest with
    a listing.
    """
    newer, newest = aliased(MirrorSourceRow), aliased(MirrorRow)
    replaced = (
        select(newer.mirror_id)
        .join(newest, newest.id == newer.mirror_id)
        .where(
            newer.manifest == MirrorSourceRow.manifest,
            newer.organisation == MirrorSourceRow.organisation,
            newest.team == MirrorRow.team,
            newer.source == MirrorSourceRow.source,
            func.coalesce(newer.recall_key, "") == func.coalesce(MirrorSourceRow.recall_key, ""),
            or_(newer.listing.is_not(None), MirrorSourceRow.listing.is_(None)),
            or_(
                newest.created_at > MirrorRow.created_at,
                and_(newest.created_at == MirrorRow.created_at, newest.id > MirrorRow.id),
            ),
        )
        .correlate(MirrorSourceRow, MirrorRow)
    )
    held = exists().where(ManifestRow.digest == MirrorSourceRow.manifest)
    needed = exists().where(MirrorSourceRow.mirror_id == MirrorRow.id, held, ~exists(replaced)).correlate(MirrorRow)
    old = (
        select(MirrorRow.id)
        .where(MirrorRow.completed_at < before, MirrorRow.status.not_in(RUNNING), ~needed)
        .where(or_(MirrorRow.claim_expires_at.is_(None), MirrorRow.claim_expires_at < before))
        .limit(_PRUNED)
        .with_for_update(skip_locked=True)  # another process deletes these now
    )
    going = list((await session.execute(old)).scalars())
    sources = select(MirrorSourceRow.mirror_id, MirrorSourceRow.position)
    owners = [listing_owner(*row) async for row in select_in(session, sources, MirrorSourceRow.mirror_id, going)]
    await chunks.of(session, chunks.end_kept, owners, chunks.NO_GRACE)
    for table in (MirrorSourceRow.mirror_id, MirrorRow.id):
        await delete_in(session, table, going)
    return len(going)


_PRUNED: Final = 250  # mirrors per transaction


async def count_by_status(session: ReadSession) -> dict[str, int]:
    query = select(MirrorRow.status, func.count()).group_by(MirrorRow.status)
    return {status: count for status, count in (await session.execute(query)).all()}  # noqa: C416 - rows are not pairs


async def named_manifests(
    session: ReadSession, organisation: str, manifest: str | None, source: str | None
) -> list[str]:
    """The manifest, as hex, stored or not; or without one the manifests of the source.

    Raises ``NotFoundError`` for a manifest that the organisation never mirrored.
    """
    if manifest is None:
        return await manifests_of_source(session, organisation, source or "")
    digest = digest_in(manifest)
    if not await sources_by_manifest(session, organisation, [digest.hex]):
        raise NotFoundError(f"manifest {digest}")
    return [digest.hex]


async def manifests_of_source(session: ReadSession, organisation: str, source: str) -> list[str]:
    """Manifests published for a source, as hex; of all its revisions unless it names one. Raises ``NotFoundError``."""
    for name in dict.fromkeys((source.rstrip("/"), source)):
        wanted = or_(MirrorSourceRow.source == name, MirrorSourceRow.source.startswith(f"{name}@", autoescape=True))
        query = (
            select(MirrorSourceRow.manifest)
            .where(MirrorSourceRow.organisation == organisation, wanted, MirrorSourceRow.manifest.is_not(None))
            .distinct()
        )
        if found := [manifest for manifest in (await session.execute(query)).scalars() if manifest]:
            return found
    raise NotFoundError(f"a mirrored source {source}")


async def sources_by_manifest(
    session: ReadSession, organisation: str, manifests: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """The sources of each manifest of an organisation. More than 500 ``manifests`` do not narrow the result."""
    query = (
        select(MirrorSourceRow.manifest, MirrorSourceRow.source)
        .where(MirrorSourceRow.organisation == organisation, MirrorSourceRow.manifest.is_not(None))
        .distinct()
        .order_by(MirrorSourceRow.source)
    )
    if manifests is not None and len(manifests) <= 500:
        query = query.where(MirrorSourceRow.manifest.in_(manifests))
    found: dict[str, list[str]] = {}
    for manifest, source in (await session.execute(query)).all():
        found.setdefault(str(manifest), []).append(source)
    return found


async def pushed_manifests(session: ReadSession, organisation: str) -> set[str]:
    """The manifests of an organisation that have a ``bt://`` source: pushed, or mirrored from a push."""
    query = select(MirrorSourceRow.manifest).where(
        MirrorSourceRow.organisation == organisation,
        MirrorSourceRow.source.startswith("bt://"),
        MirrorSourceRow.manifest.is_not(None),
    )
    return {str(manifest) for manifest in (await session.execute(query.distinct())).scalars()}


async def mirrored_after(
    session: ReadSession, organisation: str, after: str, limit: int, holder: tuple[str, str] | None = None
) -> list[str]:
    """The next manifests, in digest order, that were ever mirrored for the organisation.

    ``holder`` (cluster and node) selects the manifests that this agent holds.
    """
    query = (
        select(MirrorSourceRow.manifest)
        .where(MirrorSourceRow.organisation == organisation, MirrorSourceRow.manifest > after)
        .distinct()
        .order_by(MirrorSourceRow.manifest)
        .limit(limit)
    )
    if holder is not None:
        is_its = and_(HoldingRow.cluster == holder[0], HoldingRow.node == holder[1])
        query = query.where(exists().where(is_its, HoldingRow.manifest == MirrorSourceRow.manifest))
    return [str(manifest) for manifest in (await session.execute(query)).scalars()]


async def may_read(session: ReadSession, organisation: str, manifest: str, team: str | None = None) -> bool:
    """Whether the manifest is published for the organisation (or its team) and the organisation did not give it up."""
    return manifest in await readable(session, organisation, [manifest], team)


async def readable(
    session: ReadSession, organisation: str, manifests: Sequence[str], team: str | None = None
) -> dict[str, tuple[int, int]]:
    """Number of files and bytes of each of these manifests for which ``may_read`` is true."""
    is_theirs = is_mirrored_for(organisation, ManifestRow.digest, team)
    query = select(ManifestRow.digest, ManifestRow.files_total, ManifestRow.bytes_total).where(
        is_theirs, ~is_given_up(organisation, ManifestRow.digest)
    )
    found = select_in(session, query, ManifestRow.digest, manifests)
    return {digest: (files, size) async for digest, files, size in found}


async def all_readable(
    session: ReadSession, organisation: str, *, or_restorable: bool = False
) -> dict[str, tuple[int, int]]:
    """Number of files and bytes of each manifest that the organisation may read, or restore.

    Least recently used first.
    """
    restorable = exists().where(
        TombstoneRow.organisation == organisation,
        TombstoneRow.manifest == ManifestRow.digest,
        TombstoneRow.collected_at.is_(None),
    )
    is_read = ~is_given_up(organisation, ManifestRow.digest)
    query = select(ManifestRow.digest, ManifestRow.files_total, ManifestRow.bytes_total).where(
        is_mirrored_for(organisation, ManifestRow.digest), or_(is_read, restorable) if or_restorable else is_read
    )
    rows = await session.execute(query.order_by(ManifestRow.last_used))
    return {digest: (files, size) for digest, files, size in rows}


async def running_with(session: ReadSession, organisation: str) -> dict[str, list[str]]:
    """Manifests that a still running mirror has already published, with the ids of such mirrors."""
    query = (
        select(MirrorSourceRow.manifest, MirrorRow.id)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .where(
            MirrorRow.organisation == organisation, MirrorRow.status.in_(RUNNING), MirrorSourceRow.manifest.is_not(None)
        )
        .distinct()
    )
    found: dict[str, list[str]] = {}
    for manifest, mirror_id in (await session.execute(query)).all():
        found.setdefault(str(manifest), []).append(mirror_id)
    return found


def listing_owner(mirror_id: str, position: int) -> str:
    """The owner of the set that retains an upstream's listing of a source."""
    return f"{mirror_id}/{position}/listing"


async def take_listing(session: WriteSession, source: MirrorSourceRow, mirror_id: str, position: int) -> None:
    """Move the listing of a source to a later source that was recalled from it."""
    owners = listing_owner(source.mirror_id, source.position), listing_owner(mirror_id, position)
    await chunks.of(session, chunks.change_owner, *owners)
    await update_source(session, mirror_id, position, listing=source.listing)
    await update_source(session, source.mirror_id, source.position, listing=None)


async def replace_listing(session: WriteSession, mirror_id: str, position: int, listing: str) -> bool:
    """Give a source the listing in the set that its ``listing_owner`` fills, in place of an earlier one.

    Returns False if the source is gone. Raises ``SetEndedError``: likewise, or another request was faster.
    """
    found = await session.get(MirrorSourceRow, (mirror_id, position), with_for_update=True)
    if found is None:
        return False
    await chunks.of(session, chunks.replace_of, listing_owner(mirror_id, position))
    found.listing = listing
    return True


async def newest_ready(
    session: ReadSession, organisation: str, source: str, *, is_listed: bool = False
) -> MirrorSourceRow | None:
    """What a source was last mirrored as.

    A source without a revision means its default, or else the newest of any revision.

    ``is_listed``: the newest with a listing.
    """
    name = source.rstrip("/")
    is_revision = MirrorSourceRow.source.startswith(f"{name}@", autoescape=True)
    query = (
        select(MirrorSourceRow)
        .join(MirrorRow, MirrorRow.id == MirrorSourceRow.mirror_id)
        .where(
            MirrorRow.organisation == organisation,
            or_(MirrorSourceRow.source.in_([source, name]), is_revision),
            MirrorSourceRow.status == "READY",
            MirrorSourceRow.listing.is_not(None) if is_listed else true(),
        )
        .order_by(*([] if is_listed else [is_revision]), MirrorRow.created_at.desc(), MirrorSourceRow.position)
        .limit(1)
    )
    return (await session.execute(query)).scalar()


async def give_up(
    session: WriteSession, organisation: str, manifests: Sequence[str], eviction: str, now: float
) -> None:
    """Write tombstones for these manifests, which the organisation may read."""
    rows = [
        {"organisation": organisation, "manifest": manifest, "created_at": now, "eviction": eviction}
        for manifest in manifests
    ]
    await insert_new(session, TombstoneRow, rows)


async def restore(session: WriteSession, organisation: str, manifests: Sequence[str]) -> list[str]:
    """Remove the tombstones of those manifests that were not collected. Returns these manifests."""
    restored: list[str] = []
    for batch in batches(manifests):
        statement = (
            delete(TombstoneRow)
            .where(
                TombstoneRow.organisation == organisation,
                TombstoneRow.manifest.in_(batch),
                TombstoneRow.collected_at.is_(None),
            )
            .returning(TombstoneRow.manifest)
        )
        restored += (await session.execute(statement)).scalars()
    return restored


async def restorable(session: ReadSession, organisation: str) -> dict[str, float]:
    """The manifests that the organisation gave up and can restore, and when it gave up each."""
    query = select(TombstoneRow.manifest, TombstoneRow.created_at).where(
        TombstoneRow.organisation == organisation, TombstoneRow.collected_at.is_(None)
    )
    return {manifest: at for manifest, at in (await session.execute(query)).all()}  # noqa: C416 - rows are not pairs


async def lift_tombstone(session: WriteSession, organisation: str, manifest: str) -> None:
    statement = delete(TombstoneRow).where(TombstoneRow.organisation == organisation, TombstoneRow.manifest == manifest)
    await session.execute(statement)


def is_given_up(organisation: str | _Name, manifest: _Name) -> ColumnElement[bool]:
    return exists().where(TombstoneRow.organisation == organisation, TombstoneRow.manifest == manifest)


def is_mirrored_for(organisation: str | _Name, manifest: _Name, team: str | _Name | None = None) -> ColumnElement[bool]:
    """Whether the manifest was ever published for the organisation, or for this team of it."""
    found = exists().where(MirrorSourceRow.manifest == manifest, MirrorSourceRow.organisation == organisation)
    if team is None:
        return found
    return found.where(MirrorRow.id == MirrorSourceRow.mirror_id, MirrorRow.team == team)


async def others_read(session: ReadSession, organisation: str, manifests: Sequence[str]) -> set[str]:
    """The manifests that another organisation has mirrored and not given up."""
    query = (
        select(MirrorSourceRow.manifest)
        .where(MirrorSourceRow.organisation != organisation)
        .where(~is_given_up(MirrorSourceRow.organisation, MirrorSourceRow.manifest))
        .distinct()
    )
    return {str(manifest) async for (manifest,) in select_in(session, query, MirrorSourceRow.manifest, manifests)}


async def count_restorable(session: ReadSession) -> int:
    query = select(func.count()).select_from(TombstoneRow).where(TombstoneRow.collected_at.is_(None))
    return (await session.execute(query)).scalar_one()


# --- pushes: mirrors that no worker has ---


def push_key(source: str, team: str) -> str:
    """The ``request_key`` of a push: no mirror has the same; a second push of one checkpoint resumes the first."""
    return digest_of(f"push {source} {team}".encode()).hex


def is_push(state: MirrorState) -> bool:
    return [state.row.request_key] == [push_key(source.source, state.row.team) for source in state.sources]


async def pushes(session: ReadSession, organisation: str) -> list[tuple[MirrorRow, CheckpointUri]]:
    """The running pushes of an organisation, and the checkpoint of each."""
    query = (
        select(MirrorRow, MirrorSourceRow.source)
        .join(MirrorSourceRow, MirrorSourceRow.mirror_id == MirrorRow.id)
        .where(MirrorRow.organisation == organisation, MirrorRow.status.in_(RUNNING))
        .where(MirrorSourceRow.source.startswith("bt://"))
    )
    found = [(row, source, parse_source(source)) for row, source in (await session.execute(query)).all()]
    return [
        (row, uri)
        for row, source, uri in found
        if isinstance(uri, CheckpointUri) and row.request_key == push_key(source, row.team)
    ]


async def begin_push(session: WriteSession, mirror_id: str, now: float, until: float) -> None:
    """Turn a mirror that was just inserted into a push, with a set for its chunks."""
    statement = update(MirrorRow).where(MirrorRow.id == mirror_id)
    statement = statement.values(status="SYNCING", claimed_by=PUSHED, claim_expires_at=until, started_at=now)
    await session.execute(statement)
    await update_source(session, mirror_id, 0, status="SYNCING")
    await chunks.of(session, chunks.begin, mirror_id)


async def hold_uncommitted(session: WriteSession, organisation: str) -> int:
    """Bytes that pushes of this organisation sent and did not commit.

    Blocks this count in other processes until commit.

    Call before any write of the transaction: two callers that each hold a push and want the other push would deadlock.
    """
    going = select(MirrorRow.id).where(
        MirrorRow.organisation == organisation, MirrorRow.status == "SYNCING", MirrorRow.claimed_by == PUSHED
    )
    held = (await session.execute(going.order_by(MirrorRow.id).with_for_update())).scalars().all()
    sent = select(func.coalesce(func.sum(MirrorSourceRow.bytes_transferred), 0))
    return sum(
        [
            int((await session.execute(sent.where(MirrorSourceRow.mirror_id.in_(some)))).scalar_one())
            for some in batches(held)
        ]
    )


_ADD_TRANSFERRED: Final = (
    update(MirrorSourceRow)
    .where(MirrorSourceRow.mirror_id == bindparam("mirror"), MirrorSourceRow.position == 0)
    .values(bytes_transferred=MirrorSourceRow.bytes_transferred + bindparam("more"))
)


async def add_transferred(session: WriteSession, mirror_id: str, size: int) -> None:
    await changed_past_orm(session, _ADD_TRANSFERRED, mirror=mirror_id, more=size)
    tell(session, mirror_id)


async def transferred(session: ReadSession, mirror_id: str) -> int:
    """The number of bytes that a push received."""
    query = select(MirrorSourceRow.bytes_transferred).where(
        MirrorSourceRow.mirror_id == mirror_id, MirrorSourceRow.position == 0
    )
    return (await session.execute(query)).scalar_one()


async def name_upload(session: WriteSession, mirror_id: str, source: str, team: str) -> None:
    """Make an upload the push of this source, in a project of this team."""
    row = update(MirrorRow).where(MirrorRow.id == mirror_id)
    await session.execute(row.values(request_key=push_key(source, team), team=team))
    request = {"source": source, "mount_location": PUSH_MOUNT}
    await update_source(session, mirror_id, 0, source=source, request=request)


async def end_push(session: WriteSession, mirror_id: str, *, now: float, bytes_total: int, **values: Any) -> int:  # noqa: ANN401
    """Set the push READY, with these values of its source. Returns the number of bytes received."""
    sent = await transferred(session, mirror_id)
    reused = max(0, bytes_total - sent)
    await update_source(session, mirror_id, 0, status="READY", bytes_total=bytes_total, bytes_reused=reused, **values)
    await finish(session, mirror_id, "READY", now=now)
    return sent
