"""Every statement about secrets."""

from __future__ import annotations

from sqlalchemy import delete, select, update

from bdn.mirror.db.database import ReadSession, WriteSession, insert
from bdn.mirror.db.tables import SecretRow


async def get(session: ReadSession, organisation: str, name: str) -> SecretRow | None:
    """One secret of an organisation."""
    return await session.get(SecretRow, (organisation, name))


async def all_of(session: ReadSession, organisation: str) -> list[SecretRow]:
    """The secrets of an organisation, in the order of their names."""
    query = select(SecretRow).where(SecretRow.organisation == organisation)
    return list((await session.execute(query.order_by(SecretRow.name))).scalars())


async def organisations(session: ReadSession) -> list[str]:
    """Whoever has secrets."""
    query = select(SecretRow.organisation).distinct().order_by(SecretRow.organisation)
    return list((await session.execute(query)).scalars())


async def put(session: WriteSession, organisation: str, name: str, ciphertext: bytes, now: float) -> None:
    """Make it, or give it a new value."""
    new = insert(session, SecretRow).values(
        organisation=organisation, name=name, ciphertext=ciphertext, created_at=now, updated_at=now
    )
    changed = {"ciphertext": ciphertext, "updated_at": now}
    await session.execute(new.on_conflict_do_update(index_elements=["organisation", "name"], set_=changed))


async def reseal(session: WriteSession, row: SecretRow, ciphertext: bytes) -> None:
    """The same value, encrypted otherwise; a value that was set meanwhile stays."""
    same = (SecretRow.organisation == row.organisation, SecretRow.name == row.name)
    unchanged = SecretRow.ciphertext == row.ciphertext
    await session.execute(update(SecretRow).where(*same, unchanged).values(ciphertext=ciphertext))


async def remove(session: WriteSession, organisation: str, name: str) -> bool:
    """Whether there was one."""
    found = delete(SecretRow).where(SecretRow.organisation == organisation, SecretRow.name == name)
    return (await session.execute(found.returning(SecretRow.name))).first() is not None
