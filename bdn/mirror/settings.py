"""The mirror's settings: environment variables with the prefix ``BDN_``, or a TOML file named by ``BDN_CONFIG``."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from bdn.core.egress import EgressPolicy
from bdn.core.pace.retry import OUTAGE_SECONDS
from bdn.core.store import GRACE_SECONDS, TOMBSTONE_SECONDS
from bdn.settings import Bearer, FileSettings, Listener, LogForm, Port, Rate, Size, default_data_dir, endpoint
from bdn.sources.settings import AZURE, CLOUDFLARE_R2, COREWEAVE, UpstreamSettings, check_template
from bdn.wire.access_schema import DEFAULT_ORGANISATION, NAME_PATTERN, ORGANISATION_PATTERN
from bdn.wire.location_schema import Delivery


def _check_egress(text: str) -> str:
    EgressPolicy.parse(text)
    return text


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _check_organisations(text: str) -> str:
    for name in _words(text):
        if not re.fullmatch(ORGANISATION_PATTERN, name):
            raise ValueError(f"{name!r} cannot be the name of an organisation; write names with commas between them")
    return text


def _check_globs(text: str) -> str:
    for glob in _words(text):
        if not re.fullmatch(r"[\w./*?!\[\]-]+", glob):
            raise ValueError(
                f"{glob!r} is not a glob of repositories; write globs such as org/* with commas between them"
            )
    return text


def _issuer_url(text: str) -> str:
    """Clouds compare the address byte for byte and accept only https (OpenID Connect Discovery 1.0, section 3)."""
    parts = urlsplit(text)
    if text and (parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc):
        raise ValueError("must be an https address without user, query and fragment, such as https://bdn.example.com")
    return text.rstrip("/")


class MirrorSettings(FileSettings):
    """Secrets by name (``BDN_SECRET_<NAME>``) are read when they are used, not here."""

    data_dir: Path = Field(default_factory=default_data_dir)
    database_url: str = ""  # "" means SQLite in the data dir
    store: str = ""  # "" means file://<data dir>/store
    store_secret: str | None = None  # name of the secret with the bucket's keys; None means the environment's
    store_endpoint: Annotated[str | None, AfterValidator(endpoint)] = (
        None  # None means the endpoint of sources with this scheme
    )
    store_region: Annotated[str | None, Field(pattern=r"^([A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)?$")] = None
    store_delivery: Delivery = "direct"  # for a store that agents can read directly
    host: str = "127.0.0.1"
    port: Port = 8460
    data_port: Port = 8461
    auth: Literal["off", "token"] = "off"
    token: Bearer | None = Field(default=None, repr=False)
    tls_cert: Path | None = None  # with the key: API and data plane speak only TLS
    tls_key: Path | None = None
    tls_ca: Path | None = None  # trusted for certificates of agents; None means the system's authorities
    log: LogForm = "logfmt"
    otlp_endpoint: Annotated[str | None, AfterValidator(endpoint)] = None  # of a collector of traces
    worker_metrics: Listener | None = None  # where ``bdn worker`` serves its metrics
    secrets_dir: Path | None = None
    secrets_organisations: Annotated[str, AfterValidator(_check_organisations)] = ""  # beside the default
    secrets_key: str | None = Field(default=None, repr=False)  # base64, with commas: the first encrypts, all decrypt
    r2_endpoint_url: Annotated[str, AfterValidator(check_template)] = CLOUDFLARE_R2
    azure_endpoint_url: Annotated[str, AfterValidator(check_template)] = AZURE
    cw_endpoint_url: Annotated[str | None, AfterValidator(endpoint)] = None  # None means CoreWeave itself
    egress_allow: Annotated[str, AfterValidator(_check_egress)] = ""  # hosts and networks beyond the public internet
    issuer_url: Annotated[str, AfterValidator(_issuer_url)] = ""  # "" means no identity tokens
    identity_key_file: Path | None = None  # None means one in the data dir
    events_seconds: Annotated[float, Field(gt=0)] = 30 * 86400.0
    mirrors_seconds: Annotated[float, Field(gt=0)] = 90 * 86400.0
    kubernetes: Path | None = None  # TOML: clusters whose service-account tokens are trusted
    grant_key_file: Path | None = None  # None means one in the data dir
    grant_seconds: Annotated[int, Field(gt=0)] = 24 * 3600
    presign_seconds: Annotated[int, Field(gt=0)] = 12 * 3600  # validity of a file's address
    public_url: Annotated[str | None, AfterValidator(endpoint)] = None  # None means the address of the request
    jobs: Annotated[int, Field(gt=0)] = 4
    transfers: Annotated[int, Field(gt=0, le=256)] = 16
    outage_seconds: Annotated[float, Field(ge=0)] = OUTAGE_SECONDS  # for which failed requests are retried
    scrub_seconds: Annotated[float, Field(ge=0)] = 7 * 86400.0  # within which the whole store is read again; 0 is off
    scrub_rate: Rate = 200 * 1000**2
    upload_rate: Rate | None = None  # of the data plane; None means no limit
    tombstone_seconds: Annotated[int, Field(ge=0)] = TOMBSTONE_SECONDS  # 0: evicted manifests are collected at once
    collect_grace_seconds: Annotated[int, Field(ge=0)] = GRACE_SECONDS
    collect_seconds: Annotated[int, Field(ge=0)] = 6 * 3600  # between collections; 0: only on request
    limit_files: Annotated[int, Field(gt=0)] = 1_000_000
    limit_bytes: Annotated[Size, Field(gt=0)] = 100 * 1000**4
    limit_push_bytes: Size | None = None  # for all checkpoints of an organisation; None means no limit
    cache_bytes: Annotated[Size, Field(gt=0)] = 1000**4  # of a project's training cache without a limit of its own
    checkpoint_seconds: Annotated[int, Field(ge=0)] = 0  # lifetime of checkpoints; 0 means until they are deleted
    gateway_organisation: Annotated[str, Field(pattern=f"^({ORGANISATION_PATTERN})?$")] = (
        ""  # "": no gateway is answered
    )
    gateway_secret: Annotated[str | None, Field(pattern=f"^{NAME_PATTERN}$")] = None  # its hub token, for copies
    gateway_allow: Annotated[str, AfterValidator(_check_globs)] = "*"  # repositories
    gateway_deny: Annotated[str, AfterValidator(_check_globs)] = ""
    gateway_limit: Annotated[Size, Field(gt=0)] | None = None  # bytes of a file; None means no limit
    limit_request_bytes: Annotated[Size, Field(gt=0)] = 4 * 1024**2

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.usual_database}"

    @property
    def usual_database(self) -> Path:
        """The file of the embedded database, used unless ``database_url`` is set."""
        return self.data_dir.absolute() / "mirror.sqlite"

    @property
    def effective_store(self) -> str:
        return self.store or f"file://{self.data_dir.absolute()}/store"

    @property
    def served_organisations(self) -> frozenset[str]:
        """The organisations whose sources may name secrets of the environment and of ``secrets_dir``."""
        return frozenset({DEFAULT_ORGANISATION, *_words(self.secrets_organisations)})

    @property
    def egress(self) -> EgressPolicy:
        return EgressPolicy.parse(self.egress_allow)

    @property
    def upstreams(self) -> UpstreamSettings:
        """With the ecosystem's own variables, as the environment has them now."""
        return UpstreamSettings.from_environment(
            os.environ,
            self.egress,
            r2_endpoint_url=self.r2_endpoint_url,
            azure_endpoint_url=self.azure_endpoint_url,
            cw_endpoint_url=self.cw_endpoint_url or COREWEAVE,
        )

    @property
    def is_embedded(self) -> bool:
        """Whether the database is SQLite: one machine, one process, migrated at start."""
        return self.effective_database_url.startswith("sqlite")


def embedded_settings(data_dir: Path) -> MirrorSettings:
    """For a mirror inside another program: on free ports of loopback, without authentication."""
    return MirrorSettings(
        data_dir=data_dir,
        host="127.0.0.1",
        port=0,
        data_port=0,
        auth="off",
        token=None,
        tls_cert=None,
        tls_key=None,
        jobs=1,
    )
