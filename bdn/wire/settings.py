"""What the settings of all programs have in common: sizes as people write them, and where things are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from bdn.core.sizes import parse_size

Size = Annotated[
    int, BeforeValidator(lambda value: parse_size(value) if isinstance(value, str) else value), Field(ge=0)
]
Rate = Annotated[Size, Field(gt=0)]  # bytes per second
Port = Annotated[int, Field(ge=0, le=65535)]


class SettingsError(ValueError):
    """A setting that cannot be; the message names its variable. Commands end with a usage error."""


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/bdn``. Source: XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "bdn"
