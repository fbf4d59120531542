"""Alembic's entry point: runs on the mirror's connection, or, for Alembic's own command, on BDN_DATABASE_URL."""

import asyncio
from functools import partial

from alembic import context
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from bdn.mirror.db.database import database_url
from bdn.mirror.db.tables import Base
from bdn.mirror.settings import MirrorSettings


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_by_url() -> None:
    from bdn.mirror.db.postgres import PATIENT_SECONDS, open_postgres  # noqa: PLC0415 - a driver that SQLite does not need

    settings = MirrorSettings()
    url = database_url(settings.effective_database_url)
    patient = partial(open_postgres, statement_seconds=PATIENT_SECONDS)
    engine = (create_async_engine if settings.is_embedded else patient)(url)
    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    asyncio.run(run_by_url())
