"""Every statement about secrets and tokens."""

from sqlalchemy import delete, select, update

from bdn.mirror.db.database import ReadSession, WriteSession, insert
from bdn.mirror.db.tables import SecretRow, TokenRow


async def secret(session: ReadSession, organisation: str, name: str) -> SecretRow | None:
    """One secret of an organisation."""
    return await session.get(SecretRow, (organisation, name))


async def secrets_of(session: ReadSession, organisation: str) -> list[SecretRow]:
    """The secrets of an organisation, in the order of their names."""
    query = select(SecretRow).where(SecretRow.organisation == organisation)
    return list((await session.execute(query.order_by(SecretRow.name))).scalars())


async def organisations_with_secrets(session: ReadSession) -> list[str]:
    """Whoever has secrets."""
    query = select(SecretRow.organisation).distinct().order_by(SecretRow.organisation)
    return list((await session.execute(query)).scalars())


async def put_secret(session: WriteSession, organisation: str, name: str, ciphertext: bytes, now: float) -> None:
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


async def remove_secret(session: WriteSession, organisation: str, name: str) -> bool:
    """Whether there was one."""
    found = delete(SecretRow).where(SecretRow.organisation == organisation, SecretRow.name == name)
    return (await session.execute(found.returning(SecretRow.name))).first() is not None


async def add_token(session: WriteSession, row: TokenRow) -> None:
    """Record a new token."""
    session.add(row)
    await session.flush()


async def token_by_digest(session: ReadSession, digest: str) -> TokenRow | None:
    """The token with this SHA-256, whatever became of it."""
    return (await session.execute(select(TokenRow).where(TokenRow.digest == digest))).scalar()


async def all_tokens(session: ReadSession) -> list[TokenRow]:
    """Every token that was ever made, oldest first."""
    return list((await session.execute(select(TokenRow).order_by(TokenRow.created_at, TokenRow.id))).scalars())


async def revoke_token(session: WriteSession, token_id: str, now: float) -> TokenRow | None:
    """From now on it is good for nothing; one that was revoked before stays so. None when there is no such token."""
    statement = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None)).values(revoked_at=now)
    await session.execute(statement)
    return await session.get(TokenRow, token_id)
