"""Inserts, one row or many at once: a dataset of a million small files is three million rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

from bdn.mirror.db.database import WriteSession
from bdn.mirror.db.tables import Base

_BATCH: Final = 250  # rows per statement: SQLite allowed 999 bound parameters for a long time
_INSERTED: Final = 1000  # rows given to the driver at once, so that others get the event loop in between
_Item = TypeVar("_Item")
Row = dict[str, Any]


def insert(session: WriteSession, table: type[Base]) -> postgresql.Insert | sqlite.Insert:
    """An insert that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``, which each dialect spells in its own way."""
    rows = cast("Table", table.__table__)
    return postgresql.insert(rows) if session.get_bind().dialect.name == "postgresql" else sqlite.insert(rows)


async def insert_new(session: WriteSession, table: type[Base], rows: Sequence[Row]) -> None:
    """Insert the rows that are not there yet. Past the ORM, which costs as much again for each row."""
    statement = insert(session, table).on_conflict_do_nothing()
    connection = await session.connection()
    for batch in batches(in_key_order(table, rows), _INSERTED):
        await connection.execute(statement, list(batch))


def in_key_order(table: type[Base], rows: Sequence[Row]) -> list[Row]:
    """The order in which everybody writes, so that two writers do not lock crosswise."""
    return sorted(rows, key=itemgetter(*(column.name for column in table.__mapper__.primary_key)))


def batches(items: Sequence[_Item], size: int = _BATCH) -> Iterator[Sequence[_Item]]:
    """The items in pieces of ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
