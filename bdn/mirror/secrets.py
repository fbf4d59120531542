"""Secrets by name, resolved when they are used: environment first, then a directory of files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.errors import SecretMalformedError, SecretNotFoundError
from bdn.sources.credentials import Secret

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Secrets:
    """``BDN_SECRET_<NAME>`` (as written, then in upper case with ``_`` for other signs), then ``<directory>/<name>``."""

    directory: Path | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def resolve(self, name: str) -> Secret:
        """The secret's value now.

        Raises:
            SecretNotFoundError: nowhere, or the name could not be one.
            SecretMalformedError: the file is not text.
        """
        if not _NAME.fullmatch(name):
            raise SecretNotFoundError(name)
        for variable in (f"BDN_SECRET_{name}", f"BDN_SECRET_{re.sub('[^A-Z0-9]', '_', name.upper())}"):
            if value := self.environ.get(variable):
                return Secret(name, value)
        if self.directory is not None:
            try:
                return Secret(name, (self.directory / name).read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise SecretMalformedError(name, "is not text") from None
            except OSError:
                pass  # absent, or not ours to read: for the caller both are the same
        raise SecretNotFoundError(name)
