"""What the settings of all programs have in common: sizes as people write them, and where things are kept."""

import os
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from bdn.core.units import parse_size

Size = Annotated[
    int, BeforeValidator(lambda value: parse_size(value) if isinstance(value, str) else value), Field(ge=0)
]
Rate = Annotated[Size, Field(gt=0)]  # bytes per second
Port = Annotated[int, Field(ge=0, le=65535)]
LogForm = Literal["logfmt", "json"]


class SettingsError(ValueError):
    """A setting that cannot be; the message names its variable. Commands end with a usage error."""


class FileSettings(BaseSettings):
    """Settings of environment variables with the prefix ``BDN_``, or of the TOML file that ``BDN_CONFIG`` names, without it.

    The mirror, the commands and the agent share the file: names that are another's are passed over.
    """

    model_config = SettingsConfigDict(env_prefix="BDN_", extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the library's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller gives, then the environment, then the file. Raises ``SettingsError``."""
        return (init_settings, env_settings, InitSettingsSource(settings_cls, cls.chosen(_from_file())))

    @classmethod
    def chosen(cls, content: dict[str, Any]) -> dict[str, Any]:
        """What of the file these settings are made from."""
        return content


# Of whatever program: each reads its own. A test compares them with the settings of all.
NAMES: Final = frozenset(
    {
        "agent",
        "agent_socket",
        "auth",
        "cache_bytes",
        "checkpoint_seconds",
        "collect_grace_seconds",
        "collect_seconds",
        "data_dir",
        "data_port",
        "database_listen_url",
        "database_url",
        "egress_allow",
        "events_seconds",
        "grant_key_file",
        "grant_seconds",
        "host",
        "identity_key_file",
        "issuer_url",
        "jobs",
        "limit_bytes",
        "limit_files",
        "limit_push_bytes",
        "limit_request_bytes",
        "log",
        "mirrors_seconds",
        "organisation",
        "outage_seconds",
        "port",
        "presign_seconds",
        "r2_endpoint_url",
        "scrub_rate",
        "scrub_seconds",
        "secrets_dir",
        "secrets_key",
        "store",
        "store_delivery",
        "store_endpoint",
        "store_region",
        "store_secret",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "token",
        "tombstone_seconds",
        "transfers",
        "upload_rate",
        "url",
    }
)


def check_names(names: Iterable[str], known: Iterable[str], place: str) -> None:
    """Refuse names in a file that mean nothing: a typo would leave a default in its place. Raises ``SettingsError``."""
    for name in sorted(set(names) - set(known)):
        near = get_close_matches(name.lower().removeprefix("bdn_"), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"BDN_CONFIG: its file sets an unknown name{place}: {name}{hint}")


def _from_file() -> dict[str, Any]:
    """Nothing when no file is named. Raises ``SettingsError`` for one that is not there, cannot be read, or sets unknown names."""
    name = os.environ.get("BDN_CONFIG")
    if not name:
        return {}
    try:
        content = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"BDN_CONFIG: {name} cannot be read: {error}") from None
    check_names(content, NAMES, "")
    return content


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/bdn``. Source: XDG Base Directory Specification."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "bdn"
