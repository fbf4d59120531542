"""The agent's settings: environment variables, or the TOML file ``BDN_CONFIG`` (the agent's own in ``[agent]``)."""

import re
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from bdn.core.pace.retry import OUTAGE_SECONDS
from bdn.settings import (
    Bearer,
    FileSettings,
    Listener,
    LogForm,
    Port,
    Rate,
    ServiceUrl,
    SettingsError,
    Size,
    check_names,
    default_data_dir,
    endpoint,
)
from bdn.wire.http_fields import is_in_the_clear, is_loopback
from bdn.wire.run_schema import LauncherName

Role = Literal["node", "cluster", "job"]
_SHARED: Final = {
    "data_dir": "BDN_DATA_DIR",
    "url": "BDN_URL",
    "token": "BDN_TOKEN",
    "auth": "BDN_AUTH",
    "outage_seconds": "BDN_OUTAGE_SECONDS",
    "log": "BDN_LOG",
    "tls_ca": "BDN_TLS_CA",
    "otlp_endpoint": "BDN_OTLP_ENDPOINT",
}


def _roles(value: object) -> object:
    return tuple(filter(None, (role.strip() for role in value.split(",")))) if isinstance(value, str) else value


def _gpu(value: object) -> object:
    if not isinstance(value, tuple):
        kind, _, count = str(value).rpartition(":")
        if not re.fullmatch(r"[A-Z][A-Z0-9_]{0,127}", kind) or not re.fullmatch(r"[0-9]{1,4}", count):
            raise ValueError("must be a type and a number of GPUs, such as H200:8")
        return kind, int(count)
    return value


def _address(text: str) -> str:
    """Checked here because only peers would notice: ``host:port`` alone parses but is not a URL."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("must be a URL at which peers reach the data plane, such as http://10.0.0.5:8471")
    return text.rstrip("/")


class AgentSettings(FileSettings):
    """Settings of the operator. Prefix ``BDN_AGENT_``, except for settings shared by all BDN programs."""

    model_config = SettingsConfigDict(env_prefix="BDN_AGENT_", extra="ignore", populate_by_name=True)

    data_dir: Path = Field(default_factory=default_data_dir, validation_alias=_SHARED["data_dir"])
    url: ServiceUrl = Field(default="http://127.0.0.1:8460", validation_alias=_SHARED["url"])
    token: Bearer | None = Field(default=None, repr=False, validation_alias=_SHARED["token"])
    token_file: Path | None = None  # with the token, instead of ``token``; read at each use
    auth: Literal["off", "token"] = Field(default="off", validation_alias=_SHARED["auth"])
    outage_seconds: Annotated[float, Field(ge=0)] = Field(
        default=OUTAGE_SECONDS, validation_alias=_SHARED["outage_seconds"]
    )
    log: LogForm = Field(default="logfmt", validation_alias=_SHARED["log"])
    otlp_endpoint: Annotated[str | None, AfterValidator(endpoint)] = Field(
        default=None, validation_alias=_SHARED["otlp_endpoint"]
    )
    cache_dir: Path | None = None  # None means below the data dir
    cache_bytes: Size | None = None  # None means 90 % of the disk
    headroom_bytes: Size | None = None  # None means ``headroom_percent`` of the disk
    headroom_percent: Annotated[int, Field(ge=0, le=90)] = 5
    cluster_cache_bytes: Size | None = None  # None means a tenth of the cache, or all of it for a cluster cache alone
    keep_percent: Annotated[int, Field(ge=0, le=100)] = 50  # of its limit that a tier keeps on a full disk
    roles: Annotated[tuple[Role, ...], NoDecode, BeforeValidator(_roles), Field(min_length=1)] = ("node", "cluster")
    cluster: Annotated[str, Field(min_length=1, max_length=256)] = "default"
    node: Annotated[str, Field(min_length=1, max_length=256)] = Field(default_factory=gethostname)
    socket: Path | None = None  # None means below the data dir
    port: Port | None = None  # None means no TCP
    host: str = "127.0.0.1"  # of the data plane; the control API on TCP is always on loopback
    data_port: Port = 8471
    tls_cert: Path | None = None  # with the key: the ports accept TLS only
    tls_key: Path | None = None
    tls_ca: Path | None = Field(default=None, validation_alias=_SHARED["tls_ca"])  # None means the system's authorities
    tls: Literal["optional", "require"] = "optional"  # for connections to other machines
    advertise: Annotated[str, AfterValidator(_address)] | None = None  # None means host and data port
    gateway: Listener | None = None  # for hub clients; None: off
    metrics: Listener | None = None  # for Prometheus on other machines; None: off
    volume_root: Path | None = None  # None means below the data dir
    mounts_dir: Path | None = None  # None means below the cache dir
    exposure: Literal["auto", "bind", "symlink", "none"] = "auto"
    byte_threads: Annotated[int, Field(ge=1, le=256)] = 16  # at most, each with a buffer of 8 MiB
    download_rate: Rate | None = None  # of chunks from peers and the mirror; None means no limit
    upload_rate: Rate | None = None  # of chunks to peers
    prefetch_rate: Rate | None = None  # limit for prefetches, within the download rate
    warm_rate: Rate = 1_000_000_000  # of reading files into memory for warm stages
    scrub_seconds: Annotated[float, Field(ge=0)] = 7 * 86400  # period in which the whole cache is verified; 0: never
    scrub_rate: Rate = 100_000_000
    scratch_dir: Path | None = None  # of job volumes; None means below the cache dir
    scratch_bytes: Annotated[Size, Field(gt=0)] = 10_000_000_000  # of a rank that requests no size
    settle_seconds: Annotated[float, Field(ge=0)] = 30.0  # without changes to a checkpoint before it is pushed
    sync_rate: Rate | None = None  # of checkpoints to the mirror
    unsynced_seconds: Annotated[float, Field(ge=0)] = 7 * 86400  # before checkpoints that cannot be pushed are dropped
    keep_checkpoint: bool = True  # in the cache: the newest checkpoint of an ended job
    job_launcher: LauncherName | None = None  # of training jobs; None means the first that works here
    job_slots: Annotated[int, Field(ge=0, le=1000)] = 1  # training jobs without GPUs at a time
    gpu: Annotated[tuple[str, int], NoDecode, BeforeValidator(_gpu)] | None = None  # type and number; None means found
    limit_request_bytes: Annotated[Size, Field(gt=0)] = 4 * 1024**2

    @classmethod
    def chosen(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Shared settings from the top level, the agent's from the table ``[agent]``. Raises ``SettingsError``."""
        own = content.get("agent", {})
        if not isinstance(own, dict):
            raise SettingsError("BDN_CONFIG: in its file, agent is not a table")
        check_names(own, cls.model_fields, " in [agent]")
        shared = {field: content[field] for field in _SHARED if field in content}
        return {_SHARED.get(field, field): value for field, value in (shared | own).items()}

    @property
    def effective_cache_dir(self) -> Path:
        return self.cache_dir or self.data_dir / "cache"

    @property
    def effective_scratch_dir(self) -> Path:
        return self.scratch_dir or self.effective_cache_dir / "jobs"

    @property
    def effective_volume_root(self) -> Path:
        """The directory of training caches, shared by all nodes of a cluster."""
        return (self.volume_root or self.data_dir / "volumes").absolute()

    @property
    def effective_socket(self) -> Path:
        return self.socket or self.data_dir / "agent.sock"

    @property
    def shown_token(self) -> str | Path | None:
        """The token that the mirror gets, or the file with it."""
        return self.token_file or self.token

    def headroom_of(self, disk_bytes: int) -> int:
        """Bytes left to other programs on a disk of this size."""
        return disk_bytes * self.headroom_percent // 100 if self.headroom_bytes is None else self.headroom_bytes

    def advertised(self, data_port: int) -> str | None:
        """The data plane's URL for peers; None if it listens on loopback and the mirror is on another machine.

        A loopback address would lead each peer to itself.
        """
        if self.advertise or (is_loopback(self.host) and not is_loopback(urlsplit(self.url).hostname or "")):
            return self.advertise
        host = gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - a comparison
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://[{host}]:{data_port}" if ":" in host else f"{scheme}://{host}:{data_port}"

    def check(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise SettingsError("BDN_AGENT_TOKEN_FILE: BDN_TOKEN is set, too; set one of them")
        if "job" in self.roles and "node" not in self.roles:
            raise SettingsError("BDN_AGENT_ROLES: job needs node, which stages the weights of jobs; set node,job")
        if self.auth == "off" and not is_loopback(self.host):
            raise SettingsError(
                f"BDN_AGENT_HOST: {self.host} is not a loopback address, and without authentication the agent serves "
                "only this machine; set BDN_AUTH=token"
            )
        if self.auth == "off" and self.advertise and not is_loopback(urlsplit(self.advertise).hostname or ""):
            raise SettingsError(
                f"BDN_AGENT_ADVERTISE: {self.advertise} is not on this machine, and without authentication requests by "
                "that name are refused; set BDN_AUTH=token"
            )
        if self.tls_cert is not None and self.advertise and urlsplit(self.advertise).scheme == "http":
            raise SettingsError(
                f"BDN_AGENT_ADVERTISE: {self.advertise} is an address of plain HTTP, and with BDN_AGENT_TLS_CERT the data "
                "plane speaks TLS; let it begin with https://"
            )
        if self.tls == "require" and is_in_the_clear(self.url):
            raise SettingsError(
                f"BDN_URL: {self.url} is an address of plain HTTP, which BDN_AGENT_TLS=require refuses; give the mirror "
                "BDN_TLS_CERT and BDN_TLS_KEY, and let its address begin with https://"
            )
        if self.tls == "require" and self.tls_cert is None and not is_loopback(self.host):
            raise SettingsError(
                "BDN_AGENT_TLS: require needs BDN_AGENT_TLS_CERT and BDN_AGENT_TLS_KEY, or peers would send their grants to "
                f"{self.host} in the clear"
            )


def load_settings(**given: Any) -> AgentSettings:  # noqa: ANN401 - values of any field
    """Load and check the settings.

    Raises ``SettingsError``: one line per bad value, each with the name of its variable.
    """
    settings = AgentSettings(**given)
    settings.check()
    return settings
