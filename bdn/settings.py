"""Settings shared by all programs: sizes as people write them, and paths."""

import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from bdn.core.units import parse_size
from bdn.wire.access_schema import ORGANISATION_PATTERN

logger = logging.getLogger(__name__)
# Kubernetes sets NAME_PORT for each Service of a pod's namespace (kubelet, "service environment variables", as Docker's
# links did).
_LINK_NAME: Final = re.compile(r"BDN_(?:[A-Z0-9_]+_)?PORT")
_LINK_VALUE: Final = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")

Size = Annotated[
    int, BeforeValidator(lambda value: parse_size(value) if isinstance(value, str) else value), Field(ge=0)
]
Rate = Annotated[Size, Field(gt=0)]  # bytes per second
Port = Annotated[int, Field(ge=0, le=65535)]


def _service_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or re.search(r"\s", text):
        raise ValueError("must be an http or https address, such as http://mirror:8460")
    return text


def _bearer(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be printable ASCII without spaces, or no header can hold it")
    return text


def _listening(value: object) -> object:
    if not isinstance(value, tuple):
        host, _, port = str(value).rpartition(":")
        if not host or not re.fullmatch(r"[0-9]{1,5}", port):
            raise ValueError("must be an address and a port to listen on, such as 127.0.0.1:8473")
        return host.removeprefix("[").removesuffix("]"), int(port)
    return value


def endpoint(text: str | None) -> str | None:
    parts = urlsplit(text or "")
    is_address = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    if text and (not is_address or "@" in parts.netloc):
        raise ValueError("must be an http or https address without user, query and fragment")
    return text.rstrip("/") if text else None


Bearer = Annotated[str, AfterValidator(_bearer)]  # a token
ServiceUrl = Annotated[str, AfterValidator(_service_url)]
Listener = Annotated[tuple[str, Port], NoDecode, BeforeValidator(_listening)]
LogForm = Literal["logfmt", "json"]


class SettingsError(ValueError):
    """An invalid setting; the message names its variable. Commands end with a usage error."""


class FileSettings(BaseSettings):
    """Settings from environment variables with the prefix ``BDN_``, or without it from the TOML file ``BDN_CONFIG``.

    The mirror, the commands and the agent share the file; each ignores the names of the other programs.
    """

    model_config = SettingsConfigDict(env_prefix="BDN_", extra="ignore")

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 - values of any field
        """Raises ``SettingsError``: one line per wrong value, with its variable, the expected form, and the value."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            lines = [self._problem(str(one["loc"][0]), one["msg"], one["input"]) for one in error.errors()]
            raise SettingsError("\n".join(dict.fromkeys(lines))) from None

    @classmethod
    def _problem(cls, place: str, wanted: str, value: object) -> str:
        fields = cls.model_fields
        name = next((name for name, field in fields.items() if place in (name, field.validation_alias)), place)
        if wanted == "Field required":
            return f"{cls.variable(name)}: must be set"
        shown = f" (it is {value!r})" if name in fields and fields[name].repr else ""
        return f"{cls.variable(name)}: {wanted.removeprefix('Value error, ')}{shown}"

    @classmethod
    def variable(cls, name: str) -> str:
        field = cls.model_fields.get(name)
        alias = field.validation_alias if field else None
        return alias if isinstance(alias, str) else f"{cls.model_config.get('env_prefix', '')}{name}".upper()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the library's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The caller's values, then the environment without service links, then the file. Raises ``SettingsError``."""
        links = {name.lower() for name in service_links(os.environ)}
        if links and isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {name: value for name, value in env_settings.env_vars.items() if name not in links}
        return (init_settings, env_settings, InitSettingsSource(settings_cls, cls.chosen(_from_file())))

    @classmethod
    def chosen(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The part of the file that these settings use."""
        return content


def service_links(environ: Mapping[str, str]) -> list[str]:
    """The variables that Kubernetes made from a Service's name, such as ``BDN_PORT=tcp://10.43.0.1:8460`` from ``bdn``.

    The other forms, ``BDN_SERVICE_HOST`` and ``BDN_PORT_8460_TCP``, are not names of settings.
    """
    return sorted(name for name in environ if _LINK_NAME.fullmatch(name) and _LINK_VALUE.fullmatch(environ[name]))


def warn_of_service_links() -> None:
    """Log one line for all service links. Call once, when the log is set up."""
    if links := service_links(os.environ):
        logger.warning(
            "ignoring %s: Kubernetes set it for a Service of that name. Set enableServiceLinks: false in the pod, or rename the Service",
            ", ".join(f"{name}={os.environ[name]}" for name in links),
        )


# The names of all programs; each reads its own. A test compares them with the settings of every program.
NAMES: Final = frozenset(
    {
        "agent",
        "agent_socket",
        "auth",
        "azure_endpoint_url",
        "cache_bytes",
        "checkpoint_seconds",
        "collect_grace_seconds",
        "collect_seconds",
        "cw_endpoint_url",
        "data_dir",
        "data_port",
        "database_url",
        "egress_allow",
        "events_seconds",
        "gateway_allow",
        "gateway_deny",
        "gateway_limit",
        "gateway_organisation",
        "gateway_secret",
        "grant_key_file",
        "grant_seconds",
        "host",
        "identity_key_file",
        "issuer_url",
        "jobs",
        "kubernetes",
        "limit_bytes",
        "limit_files",
        "limit_push_bytes",
        "limit_request_bytes",
        "log",
        "mirrors_seconds",
        "organisation",
        "otlp_endpoint",
        "outage_seconds",
        "port",
        "presign_seconds",
        "public_url",
        "r2_endpoint_url",
        "scrub_rate",
        "scrub_seconds",
        "secrets_dir",
        "secrets_key",
        "secrets_organisations",
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
        "worker_metrics",
    }
)


def check_names(names: Iterable[str], known: Iterable[str], place: str) -> None:
    """Reject unknown names in a file: a typo would silently leave a default in effect. Raises ``SettingsError``."""
    for name in sorted(set(names) - set(known)):
        near = get_close_matches(name.lower().removeprefix("bdn_"), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"BDN_CONFIG: its file sets an unknown name{place}: {name}{hint}")


def _from_file() -> dict[str, Any]:
    """Empty if no file is named. Raises ``SettingsError`` if the file is missing, unreadable, or sets unknown names."""
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


class ClientSettings(FileSettings):
    """Of the commands, and of other programs that use a mirror and an agent."""

    url: ServiceUrl = "http://127.0.0.1:8460"
    token: Bearer | None = Field(default=None, repr=False)
    organisation: Annotated[str | None, Field(pattern=f"^{ORGANISATION_PATTERN}$")] = None  # for an operator's requests
    tls_ca: Path | None = None  # None trusts the system's authorities
    data_dir: Path = Field(default_factory=default_data_dir)
    agent_socket: Annotated[Path | None, Field(description="BDN_AGENT_SOCKET")] = None

    @property
    def effective_agent_socket(self) -> Path:
        return self.agent_socket or self.data_dir / "agent.sock"
