"""From a source URI to the source itself, opened with the credentials that the request or the process gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from bdn.core.errors import InvalidSourceError
from bdn.core.ports import Source
from bdn.core.source_uri import BucketUri, HuggingFaceUri, SourceUri
from bdn.sources.credentials import Secret, hugging_face_token, s3_credentials
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
            from bdn.sources.huggingface import HuggingFaceSource  # noqa: PLC0415 - see prepare

            yield HuggingFaceSource(uri, endpoint=settings.hf_endpoint, token=token, organisation=organisation)
        case BucketUri(scheme="s3"):
            from bdn.sources.s3 import S3Source  # noqa: PLC0415 - see prepare
            from bdn.sources.s3_bucket import S3Endpoint, connect  # noqa: PLC0415

            credentials = settings.s3_credentials if ambient_credentials else None
            if secret:
                credentials = s3_credentials(secret)
            region = (credentials and credentials.region) or settings.s3_region
            endpoint = S3Endpoint(settings.s3_endpoint_url, region, credentials, settings.ca_bundle)
            async with connect(uri, endpoint) as bucket:
                yield S3Source(uri, bucket, endpoint=endpoint.url or "aws", organisation=organisation)
        case BucketUri():
            raise InvalidSourceError(str(uri), f"{uri}: this version cannot open {uri.scheme}:// sources yet")


def prepare(schemes: Iterable[str]) -> None:
    """Load what sources of these schemes need, so that the first request does not wait for it. Blocking.

    Each SDK takes a quarter of a second to import, and its certificates a tenth; a command that reads from one hub shall not
    pay for all of them, and a service shall pay before somebody waits.
    """
    if "hf" in schemes:
        from bdn.sources import hub_session, huggingface  # noqa: F401, PLC0415

        hub_session.warm_up()
    if "s3" in schemes:
        from bdn.sources import s3, s3_bucket  # noqa: F401, PLC0415
