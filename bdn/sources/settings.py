"""Addresses of upstreams and the credentials of this process, from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy

DEFAULT_REGION: Final = "us-east-1"
HUGGING_FACE: Final = "https://huggingface.co"
CLOUDFLARE_R2: Final = "https://{account}[.jurisdiction].r2.cloudflarestorage.com"
COREWEAVE: Final = "https://cwobject.com"
AZURE: Final = "https://{account}.blob.core.windows.net"
TRUE: Final = ("1", "true", "yes", "on")
FALSE: Final = ("0", "false", "no", "off")
S3_ADDRESSING: Final = ("auto", "path", "virtual")
GOOGLE_STS: Final = "https://sts.googleapis.com/v1/token"
GOOGLE_IAM: Final = "https://iamcredentials.googleapis.com"
GOOGLE_OAUTH: Final = "https://oauth2.googleapis.com/token"
GOOGLE_STORAGE: Final = "https://storage.googleapis.com"


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """``region`` is None if the secret names none, ``expires_at`` (seconds since the epoch) if keys never expire."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """Addresses, and the ambient credentials, which count only for sources without ``auth`` where that is allowed."""

    hf_endpoint: str = HUGGING_FACE
    hf_token: str | None = field(default=None, repr=False)
    s3_endpoint_url: str | None = None  # None is AWS itself
    s3_region: str = DEFAULT_REGION
    s3_credentials: S3Credentials | None = None
    s3_requester_pays: bool = False
    s3_addressing: str = "auto"  # or "path", "virtual"
    r2_endpoint_url: str = CLOUDFLARE_R2  # a setting of BDN; for placeholders see ``account_address``
    cw_endpoint_url: str = COREWEAVE  # a setting of BDN
    azure_endpoint_url: str = AZURE  # a setting of BDN; for placeholders see ``account_address``
    sts_endpoint_url: str | None = None  # None is AWS itself, in the region that the request names
    google_sts_url: str = GOOGLE_STS
    google_iam_url: str = GOOGLE_IAM
    google_token_url: str = GOOGLE_OAUTH  # for service account keys without a token address
    gcs_endpoint_url: str = GOOGLE_STORAGE
    gcs_key_file: str | None = None  # a service account's JSON, read again for each source
    ca_bundle: str | None = None  # a file of certificate authorities that replaces the public ones
    egress: EgressPolicy = PUBLIC_INTERNET  # a setting of BDN, not of the ecosystem

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str],
        egress: EgressPolicy = PUBLIC_INTERNET,
        *,
        r2_endpoint_url: str = CLOUDFLARE_R2,
        cw_endpoint_url: str = COREWEAVE,
        azure_endpoint_url: str = AZURE,
    ) -> Self:
        """Read the ecosystem's own variables; an empty one counts as unset.

        AWS profiles, files and instance roles are ignored: the credentials of a mirror must be visible in one place.
        """

        def first(*names: str) -> str | None:
            return next((environ[name] for name in names if environ.get(name)), None)

        access_key_id, secret_access_key = first("AWS_ACCESS_KEY_ID"), first("AWS_SECRET_ACCESS_KEY")
        region = first("AWS_REGION", "AWS_DEFAULT_REGION")
        credentials = None
        if access_key_id and secret_access_key:
            credentials = S3Credentials(access_key_id, secret_access_key, first("AWS_SESSION_TOKEN"), region)
        return cls(
            hf_endpoint=(first("HF_ENDPOINT") or HUGGING_FACE).rstrip("/"),
            hf_token=_bare(first("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")) or _logged_in(environ),
            s3_endpoint_url=(first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or "").rstrip("/") or None,
            s3_region=region or DEFAULT_REGION,
            s3_credentials=credentials,
            s3_requester_pays=(first("BDN_SOURCE_S3_REQUESTER_PAYS") or "").lower() in TRUE,
            s3_addressing=(first("BDN_SOURCE_S3_ADDRESSING") or "auto").lower(),
            r2_endpoint_url=r2_endpoint_url,
            cw_endpoint_url=cw_endpoint_url,
            azure_endpoint_url=azure_endpoint_url,
            sts_endpoint_url=(first("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL") or "").rstrip("/") or None,
            google_sts_url=first("BDN_GOOGLE_STS_URL") or GOOGLE_STS,
            google_iam_url=(first("BDN_GOOGLE_IAM_URL") or GOOGLE_IAM).rstrip("/"),
            google_token_url=first("BDN_GOOGLE_TOKEN_URL") or GOOGLE_OAUTH,
            gcs_endpoint_url=_address(first("STORAGE_EMULATOR_HOST") or GOOGLE_STORAGE),
            gcs_key_file=first("GOOGLE_APPLICATION_CREDENTIALS"),
            ca_bundle=first("AWS_CA_BUNDLE", "SSL_CERT_FILE"),
            egress=egress,
        )


def _bare(token: str | None) -> str | None:
    return (token or "").strip() or None


def _logged_in(environ: Mapping[str, str]) -> str | None:
    """The token that ``hf auth login`` wrote, at the path of huggingface_hub.constants."""
    home = environ.get("HOME") or ""
    caches = environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    folder = environ.get("HF_HOME") or (caches and f"{caches}/huggingface")
    path = environ.get("HF_TOKEN_PATH") or (folder and f"{folder}/token")
    try:
        return _bare(Path(path).expanduser().read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):  # no login, or not readable by us
        return None


def _address(text: str) -> str:
    """``STORAGE_EMULATOR_HOST`` may be a bare host and port, as in Google's own clients."""
    return (text if "://" in text else f"http://{text}").rstrip("/")


def account_address(template: str, account: str, jurisdiction: str = "") -> str:
    """Fill in ``{account}``, ``{jurisdiction}`` and ``[.jurisdiction]``.

    Without a jurisdiction the last two become empty, dot included. A template without placeholders is the address.
    """
    part = f".{jurisdiction}" if jurisdiction else ""
    filled = template.replace("[.jurisdiction]", part).replace(".{jurisdiction}", part)
    return filled.replace("{jurisdiction}", jurisdiction).replace("{account}", account)


def check_template(template: str) -> str:
    """The template without a final slash. Raises ``ValueError`` if it does not become an address."""
    parts = urlsplit(account_address(template, "account", "eu"))
    is_address = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    if not is_address or "@" in parts.netloc or "{" in parts.geturl():
        raise ValueError(f"must be an http or https address, with placeholders as in {CLOUDFLARE_R2} or {AZURE}")
    return template.rstrip("/")
