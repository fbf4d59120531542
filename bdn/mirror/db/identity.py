"""The id of the database, which a store names as its owner."""

import secrets
from typing import Final

from sqlalchemy import select

from bdn.mirror.db.database import Database, insert_new
from bdn.mirror.db.tables import FactRow

_NAME: Final = "database"


async def database_id(database: Database) -> str:
    """The id, written by the first caller: of two replicas that start at once, one id stays.

    A backup has the id of its database.
    """
    query = select(FactRow.value).where(FactRow.name == _NAME)
    async with database.read() as session:
        found = (await session.execute(query)).scalar()
    if found is None:
        async with database.write() as session:
            await insert_new(session, FactRow, [{"name": _NAME, "value": {"id": secrets.token_hex(16)}}])
            found = (await session.execute(query)).scalar_one()
    return str(found["id"])
