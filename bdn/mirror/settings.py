"""The mirror's settings: environment variables with the prefix ``BDN_``, or a TOML file named by ``BDN_CONFIG``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from bdn.wire.settings import Port, Size, default_data_dir


class MirrorSettings(BaseSettings):
    """What an operator can set. Secrets by name (``BDN_SECRET_<NAME>``) are read when they are used, not here."""

    model_config = SettingsConfigDict(env_prefix="BDN_", extra="ignore")

    data_dir: Path = Field(default_factory=default_data_dir)
    database_url: str = ""  # "" means SQLite in the data dir
    store: str = ""  # "" means file://<data dir>/store
    host: str = "127.0.0.1"
    port: Port = 8460
    data_port: Port = 8461
    auth: Literal["off", "token"] = "off"
    token: str | None = Field(default=None, repr=False)
    secrets_dir: Path | None = None
    grant_seconds: Annotated[int, Field(gt=0)] = 24 * 3600
    jobs: Annotated[int, Field(gt=0)] = 4
    transfers: Annotated[int, Field(gt=0, le=256)] = 16
    limit_files: Annotated[int, Field(gt=0)] = 1_000_000
    limit_bytes: Annotated[Size, Field(gt=0)] = 100 * 1000**4
    limit_request_bytes: Annotated[Size, Field(gt=0)] = 4 * 1024**2

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the library's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller gives, then the environment, then the TOML file."""
        config = os.environ.get("BDN_CONFIG")
        file = (TomlConfigSettingsSource(settings_cls, Path(config)),) if config else ()
        return (init_settings, env_settings, *file)

    @property
    def effective_database_url(self) -> str:
        """The database's address, the embedded default included."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir.absolute()}/mirror.sqlite"

    @property
    def effective_store(self) -> str:
        """The store's address, the embedded default included."""
        return self.store or f"file://{self.data_dir.absolute()}/store"

    @property
    def is_embedded(self) -> bool:
        """Whether the database is SQLite: one machine, one process, migrated at start."""
        return self.effective_database_url.startswith("sqlite")
