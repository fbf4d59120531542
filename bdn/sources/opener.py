"""From a source URI to the source itself, opened with the credentials that the request or the process gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import TypedDict

from bdn.core.pace.asking import ASK_ONCE
from bdn.core.ports import Asker, Source
from bdn.core.source.uri import BucketUri, HuggingFaceUri, Scheme, SourceUri
from bdn.sources.credentials import Secret, hugging_face_token
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SignIn


@asynccontextmanager
async def open_source(
    uri: SourceUri,
    *,
    sign_in: SignIn | None,
    organisation: str,
    ambient_credentials: bool,
    settings: UpstreamSettings,
    clock: Callable[[], float] = time.time,
    asker: Asker = ASK_ONCE,
) -> AsyncIterator[Source]:
    """The source behind a URI, without a request yet.

    Args:
        uri: what to open.
        sign_in: how the request signs in, already resolved.
        organisation: who asks; private content is found again by nobody else.
        ambient_credentials: without a sign-in, read with the process's own credentials (True) or anonymously (False).
        settings: where upstreams are.
        clock: seconds since the epoch, for credentials that end.
        asker: sends every request of the source, and again where that may help.

    Raises:
        SecretMalformedError: the secret does not fit the source.
        AuthRequiredError: nothing can be read there without a sign-in.
        InvalidRequestError: a sign-in of another cloud.
    """
    await asyncio.to_thread(prepare, uri.scheme)
    asked = _Asked(organisation=organisation, settings=settings, clock=clock, asker=asker)
    match uri:
        case HuggingFaceUri():
            from bdn.sources.huggingface import HuggingFaceSource  # noqa: PLC0415 - see prepare

            yield HuggingFaceSource(
                uri,
                endpoint=settings.hf_endpoint,
                token=_hub_token(sign_in, settings.hf_token if ambient_credentials else None),
                organisation=organisation,
                egress=settings.egress,
                asker=asker,
            )
        case BucketUri(scheme="s3"):
            from bdn.sources.s3 import open_s3  # noqa: PLC0415 - see prepare

            async with open_s3(uri, sign_in, ambient_credentials=ambient_credentials, **asked) as source:
                yield source
        case BucketUri(scheme="gs"):
            from bdn.sources.open_gcs import open_gcs  # noqa: PLC0415 - see prepare

            async with open_gcs(uri, sign_in, ambient_credentials=ambient_credentials, **asked) as source:
                yield source
        case BucketUri():  # of R2
            from bdn.sources.r2 import open_r2  # noqa: PLC0415 - see prepare

            async with open_r2(uri, sign_in, **asked) as source:
                yield source


def _hub_token(sign_in: SignIn | None, ambient: str | None) -> str | None:
    return hugging_face_token(sign_in) if isinstance(sign_in, Secret) else ambient


class _Asked(TypedDict):
    organisation: str
    settings: UpstreamSettings
    clock: Callable[[], float]
    asker: Asker


@cache
def prepare(scheme: Scheme) -> None:
    """Load what sources of this scheme need, once. Blocking.

    Each SDK takes a quarter of a second and tens of megabytes, and its certificates a tenth: whoever reads from one hub shall
    not pay for all of them, and nobody who wants something else of a service shall wait for it.
    """
    match scheme:
        case "hf":
            from bdn.sources import huggingface  # noqa: F401, PLC0415
            from bdn.sources.hub import session as hub_session  # noqa: PLC0415

            hub_session.warm_up()
        case "s3":
            from bdn.sources import s3  # noqa: F401, PLC0415
        case "r2":
            from bdn.sources import r2  # noqa: F401, PLC0415
        case "gs":
            pass
