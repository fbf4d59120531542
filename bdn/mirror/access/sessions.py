"""Log-ins to the operator's page: a random id in a cookie refers to the token that began it."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import UnauthenticatedError
from bdn.mirror.access.access import Access
from bdn.mirror.access.callers import Caller, NotPermittedError
from bdn.mirror.db import sessions
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import PageSessionRow
from bdn.mirror.db.tokens import digest_of_token
from bdn.wire.access_schema import Role

SESSION_SECONDS: Final = 12 * 3600


@dataclass(frozen=True)
class Sessions:
    """Sessions are rows, so every replica knows them. A session ends with its token: each request checks the token."""

    access: Access
    database: Database
    clock: Callable[[], float]

    @property
    def are_needed(self) -> bool:
        """False with ``BDN_AUTH=off``, where each caller is the operator."""
        return self.access.token is not None

    async def begin(self, bearer: str, organisation: str | None) -> str:
        """The id of a new session, which only this answer contains. An operator may act for another organisation.

        Raises ``UnauthenticatedError``.
        """
        holder = await self.access.holder(digest_of_token(bearer))
        if holder is None:
            raise UnauthenticatedError("the token is unknown to this mirror, was revoked or has expired")
        caller = _permitted(holder, organisation)
        session_id, now = secrets.token_urlsafe(32), self.clock()
        row = PageSessionRow(
            digest=digest_of_token(session_id),
            token=digest_of_token(bearer),
            organisation=caller.organisation,
            created_at=now,
            expires_at=now + SESSION_SECONDS,
        )
        async with self.database.write() as session:
            await sessions.add(session, row, now)
        return session_id

    async def caller(self, session_id: str | None) -> Caller:
        """The caller of a session. Raises ``UnauthenticatedError`` if the session or its token is not valid now."""
        if not self.are_needed:
            return await self.access.caller(None)
        if session_id is not None:
            async with self.database.read() as session:
                row = await sessions.find(session, digest_of_token(session_id), self.clock())
            if row is not None and (caller := await self.access.holder(row.token)) is not None:
                return _permitted(caller, row.organisation)
        raise UnauthenticatedError("your session has ended: log in again")

    async def end(self, session_id: str | None) -> None:
        """Idempotent."""
        if session_id is not None:
            async with self.database.write() as session:
                await sessions.remove(session, digest_of_token(session_id))


def _permitted(caller: Caller, organisation: str | None) -> Caller:
    if caller.role is Role.AGENT:
        raise NotPermittedError("a token of role agent opens no page: log in with a token of a controller or operator")
    return caller.acting(Role.CONTROLLER, organisation)
