"""Secrets by name, resolved when they are used: the environment, then a directory of files, then the encrypted table.

The environment and the directory are the operator's, and serve every organisation; the table's secrets are those of the
organisation that set them.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bdn.core.errors import NotFoundError, SecretMalformedError, SecretNotFoundError
from bdn.mirror.db import credentials
from bdn.mirror.db.database import Database, WriteSession
from bdn.mirror.db.tables import SecretRow
from bdn.mirror.upstream.sealing import Keyring
from bdn.sources.credentials import Secret
from bdn.wire.access_schema import is_secret_name


@dataclass(frozen=True)
class Secrets:
    """``BDN_SECRET_<NAME>`` (as written, then in upper case with ``_`` for other signs), ``<directory>/<name>``, ``table``."""

    directory: Path | None
    table: SecretTable
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    async def resolve(self, name: str, organisation: str) -> Secret:
        """The secret's value now, for a source of this organisation.

        Raises:
            SecretNotFoundError: nowhere, or the name could not be one.
            SecretMalformedError: the file is not text, or the table's row cannot be decrypted.
        """
        if not is_secret_name(name):
            raise SecretNotFoundError(name)
        value = await self._operators(name) or await self.table.value(organisation, name)
        if value is None:
            raise SecretNotFoundError(name)
        return Secret(name, value)

    async def is_outranked(self, name: str) -> bool:
        """Whether the operator's environment or directory has this name, so that the table's value is not read."""
        try:
            return bool(await self._operators(name))
        except SecretMalformedError:
            return True

    async def _operators(self, name: str) -> str | None:
        for variable in (f"BDN_SECRET_{name}", f"BDN_SECRET_{re.sub('[^A-Z0-9]', '_', name.upper())}"):
            if value := self.environ.get(variable):
                return value
        if self.directory is None:
            return None
        try:
            return await asyncio.to_thread((self.directory / name).read_text, encoding="utf-8")
        except UnicodeDecodeError:
            raise SecretMalformedError(name, "is not text") from None
        except OSError:
            return None  # absent, or not ours to read: for the caller both are the same


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
            row = await credentials.secret(session, organisation, name)
        return None if row is None else self.keyring.open(organisation, name, row.ciphertext)

    async def rows(self, organisation: str) -> list[SecretRow]:
        """What there is, in the order of the names."""
        async with self.database.read() as session:
            return await credentials.secrets_of(session, organisation)

    async def set(self, organisation: str, name: str, value: str) -> None:
        """Keep this value under this name from now on."""
        sealed = self.keyring.seal(organisation, name, value)
        async with self.database.write() as session:
            await credentials.put_secret(session, organisation, name, sealed, time.time())

    async def remove(self, organisation: str, name: str) -> None:
        """Forget it; ``NotFoundError`` when there is none."""
        async with self.database.write() as session:
            if not await credentials.remove_secret(session, organisation, name):
                raise NotFoundError(f"secret {name!r}")

    async def rotate(self, organisation: str) -> None:
        """Encrypt every secret of the organisation with the first key.

        Raises:
            SecretMalformedError: one cannot be decrypted; then none has changed.
        """
        async with self.database.write() as session:
            for row in await credentials.secrets_of(session, organisation):
                await self._reseal(session, row)

    async def rotate_others(self, organisation: str) -> int:
        """Likewise the secrets of all other organisations. Returns how many are left, because they cannot be decrypted."""
        async with self.database.read() as session:
            others = [name for name in await credentials.organisations_with_secrets(session) if name != organisation]
        left = 0
        for other in others:
            async with self.database.write() as session:
                for row in await credentials.secrets_of(session, other):
                    try:
                        await self._reseal(session, row)
                    except SecretMalformedError:
                        left += 1
        return left

    async def _reseal(self, session: WriteSession, row: SecretRow) -> None:
        if self.keyring.sealed_with(row.ciphertext) != "first key":
            value = self.keyring.open(row.organisation, row.name, row.ciphertext)
            await credentials.reseal(session, row, self.keyring.seal(row.organisation, row.name, value))
