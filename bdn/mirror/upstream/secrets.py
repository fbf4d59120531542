"""Secrets by name, resolved when they are used: the environment, then a directory of files, then the encrypted table.

The environment and the directory are the operator's, and serve every organisation; the table's secrets are those of the
organisation that set them.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bdn.core.errors import SecretMalformedError, SecretNotFoundError
from bdn.mirror.upstream.secret_table import SecretTable
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
