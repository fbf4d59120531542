"""Every statement about chunks and the sets that refer to them: the rules by which the store gains and loses objects.

A row of ``chunks`` is committed before its object is put, and deleted after its object is gone. A set refers to chunks;
a chunk's ``refs`` counts its references. *Refer to it* (``refs + 1 where state <> 'leaving'``) and *let it go*
(``state = 'leaving' where refs = 0``) exclude each other, because both change the chunk's own row: under READ COMMITTED,
PostgreSQL evaluates only that row again. Every transaction inserts rows first, in the order of their digests, and then
locks rows in the order of their ids: no deadlock.

The functions are synchronous, on a ``Connection`` in a transaction: call them by ``of``. Times are the database's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Delete,
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.sql.expression import SQLColumnExpression

from bdn.core.chunk import Digest
from bdn.core.errors import StoreUnavailableError
from bdn.mirror.db.database import ReadSession, batches
from bdn.mirror.db.tables import ChunkRow, ChunkSetRow, SetChunkRow

# After this time the request that the row was changed for has ended, because its signature has expired (ADR 48).
PUT_SECONDS: Final = 900.0
DELETE_SECONDS: Final = 900.0
AT_ONCE: Final = 500  # chunks per statement
TAKEN_APART_AT_ONCE: Final = 2000  # references per transaction
NO_GRACE: Final = 0.0  # a time so long ago that no grace or request is left

_P = ParamSpec("_P")
_Answer = TypeVar("_Answer")


class ChunkState(StrEnum):
    WRITING = "writing"  # the object may be missing, partial, wrong or whole: a caller with the bytes puts it
    STORED = "stored"  # the object is there
    LEAVING = "leaving"  # a DELETE was sent, or will be: nothing may refer to it


class SetState(StrEnum):
    """A dead set is taken apart by ``take_apart``."""

    FILLING = "filling"
    PUBLISHED = "published"
    DEAD = "dead"


class SetEndedError(Exception):
    """The set is not filled any more: its owner has ended."""


class ChunkIsLeavingError(StoreUnavailableError):
    """The chunk is being deleted; it can be put again once its row is gone, or ``DELETE_SECONDS`` have passed."""


class StoredChunk(NamedTuple):
    """The row of an object that the caller is about to read or delete."""

    id: int
    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """The chunks that a set acquires, by state.

    It refers to the ``stored`` ones and those to ``put``, not the ``leaving`` ones. ``repaired`` is what was wrong with
    the durable chunks that were damaged.
    """

    stored: frozenset[Digest]
    put: frozenset[Digest]
    leaving: frozenset[Digest]
    repaired: Mapping[Digest, str]


async def of(
    session: ReadSession, function: Callable[Concatenate[Connection, _P], _Answer], *args: _P.args, **kwargs: _P.kwargs
) -> _Answer:
    """Call one of the functions below in the transaction of this session."""
    connection = await session.connection()
    return await connection.run_sync(lambda sync: function(sync, *args, **kwargs))


# --- sets ---


def begin(connection: Connection, owner: str) -> int:
    """The id of the set that this owner fills, created if there is none."""
    if (known := filling(connection, owner)) is not None:
        return known
    row = {"owner": owner, "state": SetState.FILLING}
    return connection.execute(_insert(connection, ChunkSetRow).values(row).returning(ChunkSetRow.id)).scalar_one()


def filling(connection: Connection, owner: str) -> int | None:
    query = select(ChunkSetRow.id).where(ChunkSetRow.owner == owner, ChunkSetRow.state == SetState.FILLING)
    return connection.execute(query.order_by(ChunkSetRow.id).limit(1)).scalar()


def publish(connection: Connection, set_id: int) -> None:
    """From now on the set belongs to a manifest. Raises ``SetEndedError``."""
    statement = update(ChunkSetRow).where(ChunkSetRow.id == set_id, ChunkSetRow.state == SetState.FILLING)
    if not _count(connection.execute(statement.values(state=SetState.PUBLISHED))):
        raise SetEndedError


def publish_of(connection: Connection, owner: str) -> None:
    """Retain the set that this owner fills until ``end_kept``. Raises ``SetEndedError``."""
    if (set_id := filling(connection, owner)) is None:
        raise SetEndedError
    publish(connection, set_id)


def replace_of(connection: Connection, owner: str) -> None:
    """``publish_of``, and end the set that was retained for this owner before. Raises ``SetEndedError``."""
    if (set_id := filling(connection, owner)) is None:
        raise SetEndedError
    _end(connection, and_(ChunkSetRow.owner == owner, ChunkSetRow.state == SetState.PUBLISHED), NO_GRACE)
    publish(connection, set_id)


def change_owner(connection: Connection, before: str, after: str) -> None:
    connection.execute(update(ChunkSetRow).where(ChunkSetRow.owner == before).values(owner=after))


def end(connection: Connection, set_ids: Collection[int], at: float) -> None:
    """End the sets: they retain nothing from now on, though their references are removed later.

    The grace of chunks without another reference begins at ``at``; with ``NO_GRACE`` it is over.
    """
    for some in batches(sorted(set_ids), AT_ONCE):
        _end(connection, ChunkSetRow.id.in_(some), at)


def end_kept(connection: Connection, owners: Collection[str], at: float) -> None:
    """End the sets that ``publish_of`` retained for these owners."""
    for some in batches(sorted(owners), AT_ONCE):
        _end(connection, ChunkSetRow.owner.in_(some), at)


def end_of(connection: Connection, mirror: str, at: float) -> None:
    """End the sets that this mirror or push fills."""
    is_own = or_(ChunkSetRow.owner == mirror, ChunkSetRow.owner.startswith(f"{mirror}/", autoescape=True))
    _end(connection, and_(is_own, ChunkSetRow.state == SetState.FILLING), at)


def _end(connection: Connection, which: ColumnElement[bool], at: float) -> None:
    statement = update(ChunkSetRow).where(which, ChunkSetRow.state != SetState.DEAD)
    connection.execute(statement.values(state=SetState.DEAD, ended_at=at))


# Built once: to build a statement takes longer than SQLite needs to execute it.
_STATE: Final = select(ChunkSetRow.state).where(ChunkSetRow.id == bindparam("set_id")).with_for_update(read=True)
_CHUNKS: Final = ChunkRow.id.in_(bindparam("chunk_ids", expanding=True))
_STORE: Final = update(ChunkRow).where(_CHUNKS).values(state=ChunkState.STORED, damage=None)
_REFER: Final = update(ChunkRow).where(_CHUNKS).values(refs=ChunkRow.refs + 1)


def _check_filling(connection: Connection, set_id: int) -> None:
    """Check that the set is being filled; it cannot end before commit. Raises ``SetEndedError``."""
    if connection.execute(_STATE, {"set_id": set_id}).scalar() != SetState.FILLING:
        raise SetEndedError


# --- references ---


def acquire(
    connection: Connection, set_id: int, sizes: Mapping[Digest, int], now: float, durable: Collection[Digest] = ()
) -> Acquired:
    """Refer to these chunks before they are put, with rows where there are none.

    The caller acquires the ``leaving`` ones again, once their rows are gone or ``DELETE_SECONDS`` have passed.
    ``durable`` are chunks that the set acquired before, and whose objects are durable and right now: they are stored.

    Raises ``SetEndedError``; the objects of ``durable`` may be gone again then.
    """
    _check_filling(connection, set_id)
    new = _insert(connection, ChunkRow).on_conflict_do_nothing(index_elements=["digest"])
    for some in batches(sorted(sizes), AT_ONCE):
        connection.execute(new, [_new_row(digest, sizes[digest], now) for digest in some])
    rows = {Digest.from_bytes(row[1]): row for row in _locked(connection, {*sizes, *durable})}
    written = [rows[one] for one in durable if one in rows and rows[one][2] == ChunkState.WRITING]
    _execute_in(connection, _STORE, [row[0] for row in written])
    put: list[_Locked] = []
    stored: list[_Locked] = []
    for digest in sizes.keys() & rows.keys():  # a row may have gone before the lock
        row = rows[digest]
        if row[2] == ChunkState.STORED or (digest in durable and row[2] == ChunkState.WRITING):
            stored.append(row)
        elif row[2] == ChunkState.WRITING or row[5] <= now - DELETE_SECONDS:  # leaving, and its collection died
            put.append(row)
    _refer(connection, set_id, sorted(row[0] for row in (*stored, *put)))
    older = [row[0] for row in put if row[2:6:3] != (ChunkState.WRITING, now)]
    _execute_in(connection, update(ChunkRow).where(_CHUNKS).values(state=ChunkState.WRITING, changed_at=now), older)
    is_stored, is_put = (frozenset(Digest.from_bytes(row[1]) for row in some) for some in (stored, put))
    repaired = {Digest.from_bytes(row[1]): row[4] for row in written if row[4] is not None}
    return Acquired(is_stored, is_put, frozenset(sizes) - is_stored - is_put, repaired)


def hold(connection: Connection, set_id: int, digests: Iterable[Digest]) -> dict[Digest, int]:
    """Refer to the stored ones of these chunks. Returns them with their sizes. Raises ``SetEndedError``."""
    _check_filling(connection, set_id)
    known = [row for row in _locked(connection, digests) if row[2] == ChunkState.STORED]
    _refer(connection, set_id, [row[0] for row in known])
    return {Digest.from_bytes(raw): size for _, raw, _, size, *_ in known}


def mark_damaged(connection: Connection, digest: Digest, reason: str, now: float) -> bool:
    """Record that a stored chunk's object is wrong or missing: the chunk counts as never put.

    Returns False if it is not stored.
    """
    statement = update(ChunkRow).where(ChunkRow.digest == digest.to_bytes(), ChunkRow.state == ChunkState.STORED)
    values = {"state": ChunkState.WRITING, "damage": reason, "changed_at": now}
    return _count(connection.execute(statement.values(values))) > 0


def _new_row(digest: Digest, size: int, now: float) -> dict[str, object]:
    return {"digest": digest.to_bytes(), "size": size, "state": ChunkState.WRITING, "refs": 0, "changed_at": now}


_Locked = tuple[int, bytes, str, int, str | None, float]  # id, raw digest, state, size, damage and time of change


_COLUMNS: Final = (
    ChunkRow.id,
    ChunkRow.digest,
    ChunkRow.state,
    ChunkRow.size,
    ChunkRow.damage,
    ChunkRow.changed_at,
)
_LOCKED: Final = select(*_COLUMNS).order_by(ChunkRow.id).with_for_update()
_LOCKED_BY_ID: Final = _LOCKED.where(_CHUNKS)
_LOCKED_BY_DIGEST: Final = _LOCKED.where(ChunkRow.digest.in_(bindparam("digests", expanding=True)))


def _locked(connection: Connection, digests: Iterable[Digest]) -> list[_Locked]:
    wanted = [digest.to_bytes() for digest in set(digests)]
    if len(wanted) <= AT_ONCE:
        return _rows(connection, _LOCKED_BY_DIGEST, {"digests": wanted}) if wanted else []
    ids: list[int] = []
    for some in batches(wanted, AT_ONCE):
        ids += connection.execute(select(ChunkRow.id).where(ChunkRow.digest.in_(some))).scalars()
    return _lock(connection, ids)


def _lock(connection: Connection, ids: Collection[int]) -> list[_Locked]:
    locked: list[_Locked] = []
    for some in batches(sorted(ids), AT_ONCE):
        locked += _rows(connection, _LOCKED_BY_ID, {"chunk_ids": some})
    return locked


def _rows(
    connection: Connection, query: Select[int, bytes, str, int, str | None, float], given: Mapping[str, object]
) -> list[_Locked]:
    return [(row[0], row[1], row[2], row[3], row[4], row[5]) for row in connection.execute(query, given)]


def _refer(connection: Connection, set_id: int, chunk_ids: Sequence[int]) -> None:
    """Count each reference once, however often the set names the chunk.

    The rows are locked, and none of them is leaving.
    """
    new = _insert(connection, SetChunkRow).on_conflict_do_nothing(index_elements=["set_id", "chunk_id"])
    for some in batches(chunk_ids, AT_ONCE):
        rows = [{"set_id": set_id, "chunk_id": chunk} for chunk in some]
        added = list(connection.execute(new.returning(SetChunkRow.chunk_id), rows).scalars())
        _execute_in(connection, _REFER, added)


def keep_only(connection: Connection, set_id: int, digests: Collection[Digest], now: float) -> None:
    """Remove all references of the set, which is being filled, except to these chunks."""
    others = [row for row in _rows_of(connection, set_id) if row[1] not in digests]
    for some in batches(sorted(row[0] for row in others), AT_ONCE):
        _let_go(connection, set_id, some, now)


def _rows_of(connection: Connection, set_id: int) -> list[tuple[int, Digest]]:
    query = select(ChunkRow.id, ChunkRow.digest).join(SetChunkRow, SetChunkRow.chunk_id == ChunkRow.id)
    rows = connection.execute(query.where(SetChunkRow.set_id == set_id))
    return [(row[0], Digest.from_bytes(row[1])) for row in rows]


# --- what goes ---


def take_apart(connection: Connection) -> int:
    """Remove some references of a dead set, or the set if it has none. Returns how many rows; 0 if no set is dead.

    The set that ended first goes first: chunks of several dead sets have their grace from the end of the last one.
    """
    dead = select(ChunkSetRow.id, ChunkSetRow.ended_at).where(ChunkSetRow.state == SetState.DEAD)
    first = connection.execute(dead.order_by(ChunkSetRow.ended_at, ChunkSetRow.id).limit(1)).first()
    if first is None:
        return 0
    set_id, ended_at = first
    some = select(SetChunkRow.chunk_id).where(SetChunkRow.set_id == set_id)
    ids = list(connection.execute(some.order_by(SetChunkRow.chunk_id).limit(TAKEN_APART_AT_ONCE)).scalars())
    if not ids:
        connection.execute(delete(ChunkSetRow).where(ChunkSetRow.id == set_id))
        return 1
    for part in batches(ids, AT_ONCE):
        _let_go(connection, set_id, part, ended_at or NO_GRACE)
    return len(ids)


def _let_go(connection: Connection, set_id: int, chunk_ids: Sequence[int], at: float) -> None:
    _lock(connection, chunk_ids)
    gone = delete(SetChunkRow).where(SetChunkRow.set_id == set_id, SetChunkRow.chunk_id.in_(chunk_ids))
    taken = list(connection.execute(gone.returning(SetChunkRow.chunk_id)).scalars())
    may_come = and_(ChunkRow.state == ChunkState.WRITING, ChunkRow.changed_at > at)  # a PUT is under way since then
    last = case((or_(ChunkRow.refs > 1, may_come), ChunkRow.changed_at), else_=at)
    _execute_in(connection, update(ChunkRow).where(_CHUNKS).values(refs=ChunkRow.refs - 1, changed_at=last), taken)


def collect(connection: Connection, grace_seconds: float, now: float, limit: int = AT_ONCE) -> list[StoredChunk]:
    """Let go of some chunks without a reference for that long. The caller deletes their objects, then calls ``forget``.

    A chunk whose DELETE may have got no answer is returned again after ``DELETE_SECONDS``. A chunk whose PUT may still
    be under way stays for ``PUT_SECONDS``.
    """
    query = select(ChunkRow.id, ChunkRow.digest, ChunkRow.size)
    query = query.where(ChunkRow.refs == 0, is_collectable(ChunkRow.changed_at, grace_seconds, now))
    # Skips rows that another collection locked. A row that got a reference meanwhile is evaluated again, and stays.
    locked = query.order_by(ChunkRow.changed_at).limit(limit).with_for_update(skip_locked=True)
    found = connection.execute(locked).all()
    ids = [row[0] for row in found]
    _execute_in(connection, update(ChunkRow).where(_CHUNKS).values(state=ChunkState.LEAVING, changed_at=now), ids)
    return [StoredChunk(row[0], Digest.from_bytes(row[1]), row[2]) for row in found]


def is_collectable(changed_at: SQLColumnExpression[float], grace_seconds: float, now: float) -> ColumnElement[bool]:
    """Whether a ``ChunkRow`` without references since ``changed_at`` may go."""
    grace = now - grace_seconds
    return or_(
        and_(ChunkRow.state == ChunkState.STORED, changed_at <= grace),
        and_(ChunkRow.state == ChunkState.WRITING, changed_at <= min(grace, now - PUT_SECONDS)),
        and_(ChunkRow.state == ChunkState.LEAVING, changed_at <= now - DELETE_SECONDS),
    )


def forget(connection: Connection, chunks: Iterable[StoredChunk], let_go_at: float) -> None:
    """Delete the rows of chunks that were let go at this time and whose objects are gone.

    If another collection has let go of a chunk again since then, its DELETE is under way, and it deletes the row.
    """
    ids = [chunk.id for chunk in chunks]
    _lock(connection, ids)
    is_own = ChunkRow.state == ChunkState.LEAVING, ChunkRow.changed_at == let_go_at
    _execute_in(connection, delete(ChunkRow).where(_CHUNKS, *is_own), ids)


def end_deletions(connection: Connection) -> None:
    """Let chunks that are leaving be put or deleted again at once. The caller knows that no DELETE is under way."""
    statement = update(ChunkRow).where(ChunkRow.state == ChunkState.LEAVING)
    connection.execute(statement.values(changed_at=NO_GRACE))


def let_orphans_go(connection: Connection, sizes: Mapping[Digest, int], now: float) -> list[StoredChunk]:
    """Let go of those listed objects of the store that have no row. Continue as after ``collect``."""
    found: list[StoredChunk] = []
    for some in batches(sorted(sizes), AT_ONCE):
        rows = [_new_row(digest, sizes[digest], now) | {"state": ChunkState.LEAVING} for digest in some]
        new = _insert(connection, ChunkRow).values(rows).on_conflict_do_nothing(index_elements=["digest"])
        added = connection.execute(new.returning(ChunkRow.id, ChunkRow.digest, ChunkRow.size))
        found += [StoredChunk(chunk, Digest.from_bytes(raw), size) for chunk, raw, size in added]
    return found


# --- reads ---


def names(connection: Connection, set_id: int) -> list[Digest]:
    return [digest for _, digest in _rows_of(connection, set_id)]


def known(
    connection: Connection,
    digests: Iterable[Digest],
    set_ids: Collection[int] | None = None,
    *,
    is_stored: bool = False,
) -> dict[Digest, int]:
    """The sizes of these chunks, of chunks with a row alone, damaged ones included.

    With ``set_ids``, only of chunks that one of these sets refers to.
    """
    query = select(ChunkRow.digest, ChunkRow.size)
    if set_ids is not None:
        query = query.where(exists().where(SetChunkRow.chunk_id == ChunkRow.id, SetChunkRow.set_id.in_(set_ids)))
    if is_stored:
        query = query.where(ChunkRow.state == ChunkState.STORED)
    found: dict[Digest, int] = {}
    for some in batches(sorted(set(digests)), AT_ONCE):
        rows = connection.execute(query.where(ChunkRow.digest.in_([digest.to_bytes() for digest in some])))
        found |= {Digest.from_bytes(raw): size for raw, size in rows}
    return found


def stored(
    connection: Connection, digests: Iterable[Digest], set_ids: Collection[int] | None = None
) -> dict[Digest, int]:
    """``known`` for stored chunks alone. A collection may delete them, unless a set refers to them: see ``hold``."""
    return known(connection, digests, set_ids, is_stored=True)


def is_damaged(connection: Connection, set_id: int) -> bool:
    """Whether a scrub found a chunk of the set wrong, and it was not put again since."""
    damaged = select(ChunkRow.id).where(ChunkRow.damage.is_not(None))
    if connection.execute(damaged.limit(1)).first() is None:  # usually none is
        return False
    named = exists().where(SetChunkRow.chunk_id == ChunkRow.id, SetChunkRow.set_id == set_id)
    return connection.execute(damaged.where(named).limit(1)).first() is not None


def bytes_of(connection: Connection, set_ids: Collection[int]) -> int:
    """The bytes of the distinct chunks that these sets refer to."""
    if not set_ids:
        return 0
    named = exists().where(SetChunkRow.chunk_id == ChunkRow.id, SetChunkRow.set_id.in_(set_ids))
    return int(connection.execute(select(func.coalesce(func.sum(ChunkRow.size), 0)).where(named)).scalar_one())


def totals(connection: Connection) -> tuple[int, int]:
    """The number of chunks in the store, and their bytes."""
    query = select(func.count(), func.coalesce(func.sum(ChunkRow.size), 0)).where(ChunkRow.state == ChunkState.STORED)
    count, size = connection.execute(query).one()
    return int(count), int(size)


def _insert(connection: Connection, table: type[ChunkRow | ChunkSetRow | SetChunkRow]) -> sqlite.Insert:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return cast("sqlite.Insert", dialect.insert(table))


def _execute_in(connection: Connection, statement: Update | Delete, chunk_ids: Sequence[int]) -> None:
    for some in batches(list(chunk_ids), AT_ONCE):
        connection.execute(statement, {"chunk_ids": some})


def _count(result: CursorResult[tuple[object, ...]]) -> int:
    return result.rowcount
