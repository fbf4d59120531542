"""The secrets that organisations keep in the mirror's database, encrypted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bdn.core.errors import NotFoundError
from bdn.mirror.database import Database
from bdn.mirror.repository import secrets
from bdn.mirror.sign_in.sealing import Keyring
from bdn.mirror.tables import SecretRow


@dataclass(frozen=True)
class SecretTable:
    """An organisation reads and writes its own secrets alone."""

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
        """Encrypt every secret with the first key, so that the older ones can go.

        Raises:
            SecretMalformedError: one cannot be decrypted; then none has changed.
        """
        async with self.database.write() as session:
            for row in await secrets.all_of(session, organisation):
                if self.keyring.sealed_with(row.ciphertext) != "first key":
                    value = self.keyring.open(organisation, row.name, row.ciphertext)
                    await secrets.reseal(session, row, self.keyring.seal(organisation, row.name, value))
