"""The one statement that SQLAlchemy spells by dialect: insert, and what to do when the row is there already."""

from __future__ import annotations

from typing import cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

from bdn.mirror.db.database import WriteSession
from bdn.mirror.db.tables import Base


def insert(session: WriteSession, table: type[Base]) -> postgresql.Insert | sqlite.Insert:
    """An insert that has ``on_conflict_do_nothing`` and ``on_conflict_do_update``."""
    rows = cast("Table", table.__table__)
    return postgresql.insert(rows) if session.get_bind().dialect.name == "postgresql" else sqlite.insert(rows)
