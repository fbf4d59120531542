"""From a source URI to the source itself, opened with the credentials that the request or the process gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bdn.core.errors import InvalidSourceError
from bdn.core.ports import Source
from bdn.core.source_uri import BucketUri, HuggingFaceUri, SourceUri
from bdn.sources.credentials import Secret, hugging_face_token, s3_credentials
from bdn.sources.huggingface import HuggingFaceSource
from bdn.sources.s3 import S3Source
from bdn.sources.s3_bucket import S3Endpoint, connect
from bdn.sources.settings import UpstreamSettings


@asynccontextmanager
async def open_source(
    uri: SourceUri,
    *,
    secret: Secret | None,
    organisation: str,
    ambient_credentials: bool,
    settings: UpstreamSettings,
) -> AsyncIterator[Source]:
    """The source behind a URI, without a request yet.

    Args:
        uri: what to open.
        secret: the credentials that the request names, already resolved.
        organisation: who asks; private content is found again by nobody else.
        ambient_credentials: without a secret, read with the process's own credentials (True) or anonymously (False).
        settings: where upstreams are.

    Raises:
        SecretMalformedError: the secret does not fit the source.
        InvalidSourceError: a scheme that this version cannot open.
    """
    match uri:
        case HuggingFaceUri():
            token = settings.hf_token if ambient_credentials else None
            if secret:
                token = hugging_face_token(secret)
            yield HuggingFaceSource(uri, endpoint=settings.hf_endpoint, token=token, organisation=organisation)
        case BucketUri(scheme="s3"):
            endpoint = _s3_endpoint(secret, settings, ambient_credentials=ambient_credentials)
            async with connect(uri, endpoint) as bucket:
                yield S3Source(uri, bucket, endpoint=endpoint.url or "aws", organisation=organisation)
        case BucketUri():
            raise InvalidSourceError(str(uri), f"{uri}: this version cannot open {uri.scheme}:// sources yet")


def _s3_endpoint(secret: Secret | None, settings: UpstreamSettings, *, ambient_credentials: bool) -> S3Endpoint:
    credentials = settings.s3_credentials if ambient_credentials else None
    if secret:
        credentials = s3_credentials(secret)
    region = (credentials and credentials.region) or settings.s3_region
    return S3Endpoint(settings.s3_endpoint_url, region, credentials, settings.ca_bundle)
