"""A source of GCS, opened as whoever the request or the process signs in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.core.pace.asking import ASK_ONCE
from bdn.core.ports import Asker
from bdn.core.source.uri import BucketUri
from bdn.sources.credentials import Secret
from bdn.sources.gcs import GcsSource
from bdn.sources.google.bucket import GcsEndpoint, connect
from bdn.sources.google.identity import ServiceAccountTokens
from bdn.sources.google.key_tokens import KeyTokens
from bdn.sources.google.tokens import TokenProvider
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import GoogleServiceAccount, SignIn

_AMBIENT: Final = "GOOGLE_APPLICATION_CREDENTIALS"


@asynccontextmanager
async def open_gcs(
    uri: BucketUri,
    sign_in: SignIn | None,
    *,
    organisation: str,
    ambient_credentials: bool,
    settings: UpstreamSettings,
    clock: Callable[[], float] = time.time,
    asker: Asker = ASK_ONCE,
) -> AsyncIterator[GcsSource]:
    """The source, without a request yet; the arguments are those of ``open_source``."""

    def tokens() -> TokenProvider | None:
        match sign_in:
            case Secret():
                return KeyTokens(sign_in, str(uri), settings, clock=clock, asker=asker)
            case GoogleServiceAccount():
                return ServiceAccountTokens(sign_in, str(uri), settings, clock=clock, asker=asker)
            case None if ambient_credentials and settings.gcs_key_file:
                own = Secret(_AMBIENT, _content(settings.gcs_key_file))
                return KeyTokens(own, str(uri), settings, clock=clock, asker=asker)
            case None:
                return None
            case _:
                raise InvalidRequestError(f"{uri} cannot be read with a role of AWS")

    # In a thread, because reading a private key takes milliseconds, and a file as long as its disk.
    provider = await asyncio.to_thread(tokens)
    endpoint = GcsEndpoint(settings.gcs_endpoint_url, provider, settings.egress, settings.ca_bundle)
    async with connect(uri, endpoint, asker=asker) as bucket:
        yield GcsSource(uri, bucket, endpoint=endpoint.url, organisation=organisation)


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise SecretMalformedError(_AMBIENT, "names a file that cannot be read") from None
