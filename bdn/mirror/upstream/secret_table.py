"""The secrets that organisations keep in the mirror's database, encrypted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bdn.core.errors import NotFoundError, SecretMalformedError
from bdn.mirror.db import secrets
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.tables import SecretRow
from bdn.mirror.upstream.sealing import Keyring


@dataclass(frozen=True)
class SecretTable:
    """An organisation reads and writes its own secrets alone; an operator gives those of all another key."""

    database: Database
    keyring: Keyring

    async def value(self, organisation: str, name: str) -> str | None:
        """The value now, or None where there is no such secret.

        Raises:
            SecretMalformedError: it is there and cannot be decrypted.
        """
        async with self.database.read() as session:
            row = await secrets.get(session, organisation, name)
        return None if row is None else self.keyring.open(organisation, name, row.ciphertext)

    async def rows(self, organisation: str) -> list[SecretRow]:
        """What there is, in the order of the names."""
        async with self.database.read() as session:
            return await secrets.all_of(session, organisation)

    async def set(self, organisation: str, name: str, value: str) -> None:
        """Keep this value under this name from now on."""
        sealed = self.keyring.seal(organisation, name, value)
        async with self.database.write() as session:
            await secrets.put(session, organisation, name, sealed, time.time())

    async def remove(self, organisation: str, name: str) -> None:
        """Forget it; ``NotFoundError`` when there is none."""
        async with self.database.write() as session:
            if not await secrets.remove(session, organisation, name):
                raise NotFoundError(f"secret {name!r}")

    async def rotate(self, organisation: str) -> None:
        """Encrypt every secret of the organisation with the first key.

        Raises:
            SecretMalformedError: one cannot be decrypted; then none has changed.
        """
        async with self.database.write() as session:
            for row in await secrets.all_of(session, organisation):
                await self._reseal(session, row)

    async def rotate_others(self, organisation: str) -> int:
        """Likewise the secrets of all other organisations. Returns how many are left, because they cannot be decrypted."""
        async with self.database.read() as session:
            others = [name for name in await secrets.organisations(session) if name != organisation]
        left = 0
        for other in others:
            async with self.database.write() as session:
                for row in await secrets.all_of(session, other):
                    try:
                        await self._reseal(session, row)
                    except SecretMalformedError:
                        left += 1
        return left

    async def _reseal(self, session: WriteSession, row: SecretRow) -> None:
        if self.keyring.sealed_with(row.ciphertext) != "first key":
            value = self.keyring.open(row.organisation, row.name, row.ciphertext)
            await secrets.reseal(session, row, self.keyring.seal(row.organisation, row.name, value))
