"""Tokens of organisations: created here, shown once, stored as their SHA-256.

Thirty-two random bytes need no slow hash: they cannot be guessed, and the time of a lookup by digest reveals nothing
about them.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from sqlalchemy import select, update

from bdn.core.errors import NotFoundError
from bdn.mirror.db import projects
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import TokenRow
from bdn.wire.access_schema import NewToken, Token, TokenRequest

_PREFIX: Final = "bdn_"  # can be found by scanners for leaked secrets
_FORM: Final = re.compile(rf"{_PREFIX}[A-Za-z0-9_-]{{43}}")


@dataclass(frozen=True)
class TokenTable:
    """The tokens in the database.

    Each call reads the database: a token that is revoked or expires is refused at once, in every replica.
    """

    database: Database
    clock: Callable[[], float]

    async def create(self, request: TokenRequest) -> NewToken:
        """Create a token, which only this answer contains.

        Raises ``NotFoundError`` if the organisation has no such team.
        """
        token = f"{_PREFIX}{secrets.token_urlsafe(32)}"
        now = self.clock()
        row = TokenRow(
            id=f"tok_{secrets.token_hex(12)}",
            organisation=request.organisation,
            name=request.name,
            role=request.role.value,
            cluster=request.cluster,
            team=request.team,
            digest=digest_of_token(token),
            created_at=now,
            expires_at=None if request.expires_seconds is None else now + request.expires_seconds,
            revoked_at=None,
        )
        async with self.database.write() as session:
            if row.team is not None:
                await projects.check_team(session, row.organisation, row.team, now)
            session.add(row)
        return NewToken(**_view(row).model_dump(), token=token)

    async def all(self) -> list[Token]:
        """Every token, oldest first, including revoked and expired ones."""
        query = select(TokenRow).order_by(TokenRow.created_at, TokenRow.id)
        async with self.database.read() as session:
            return [_view(row) for row in (await session.execute(query)).scalars()]

    async def revoke(self, token_id: str) -> Token:
        """Idempotent: the time of the first revocation stays. Raises ``NotFoundError``."""
        valid = update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None))
        async with self.database.write() as session:
            await session.execute(valid.values(revoked_at=self.clock()))
            row = await session.get(TokenRow, token_id)
        if row is None:
            raise NotFoundError(f"token {token_id}")
        return _view(row)

    async def valid(self, digest: str) -> Token | None:
        """The token with this SHA-256, or None if it is unknown, revoked or expired. One statement."""
        async with self.database.read() as session:
            row = (await session.execute(select(TokenRow).where(TokenRow.digest == digest))).scalar()
        if row is None or row.revoked_at is not None:
            return None
        if row.expires_at is not None and row.expires_at <= self.clock():
            return None
        return _view(row)


def is_token(bearer: str) -> bool:
    """Whether it has the form of our tokens, which no grant has."""
    return _FORM.fullmatch(bearer) is not None


def digest_of_token(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def _view(row: TokenRow) -> Token:
    return Token.model_validate(row, from_attributes=True)
