"""Where upstreams are and whose credentials this process carries: what the environment says, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from bdn.sources.credentials import DEFAULT_REGION, S3Credentials

HUGGING_FACE: Final = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """Addresses, and the ambient credentials that count only for sources without ``auth`` where that is allowed."""

    hf_endpoint: str = HUGGING_FACE
    hf_token: str | None = field(default=None, repr=False)
    s3_endpoint_url: str | None = None  # None is AWS itself
    s3_region: str = DEFAULT_REGION
    s3_credentials: S3Credentials | None = None
    ca_bundle: str | None = None  # a file of certificate authorities to trust instead of the public ones

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the ecosystem's own variables; an empty one is an unset one.

        AWS profiles, files and instance roles are left alone: what a mirror reads with has to be visible in one place.
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
            hf_token=first("HF_TOKEN"),
            s3_endpoint_url=(first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or "").rstrip("/") or None,
            s3_region=region or DEFAULT_REGION,
            s3_credentials=credentials,
            ca_bundle=first("AWS_CA_BUNDLE", "SSL_CERT_FILE"),
        )
