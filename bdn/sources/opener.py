"""From a source URI to the source itself, opened with the credentials that the request or the process gives.

A new scheme is a URI in ``core/source/uri.py``, a folder here, and a row in ``_OPENERS``.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Final

from bdn.core.source.upstream import ASK_ONCE, Asker, Source
from bdn.core.source.uri import Scheme, SourceUri
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SignIn

# Functions with the parameters of ``open_source``.
_OPENERS: Final[Mapping[Scheme, str]] = {
    "hf": "bdn.sources.huggingface.source:open_hugging_face",
    "s3": "bdn.sources.s3.source:open_s3",
    "r2": "bdn.sources.s3.source:open_r2",
    "gs": "bdn.sources.gcs.source:open_gcs",
}


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
        asker: sends every request of the source, with retries.

    Raises:
        SecretMalformedError: the secret does not fit the source.
        AuthRequiredError: nothing can be read there without a sign-in.
        InvalidRequestError: a sign-in of another cloud.
    """
    opener = await asyncio.to_thread(prepare, uri.scheme)
    async with opener(
        uri,
        sign_in=sign_in,
        organisation=organisation,
        ambient_credentials=ambient_credentials,
        settings=settings,
        clock=clock,
        asker=asker,
    ) as source:
        yield source


@cache
def prepare(scheme: Scheme) -> Callable[..., AbstractAsyncContextManager[Source]]:
    """Import what sources of this scheme need, once. Blocking.

    Each SDK takes a quarter of a second and tens of megabytes: a service that reads one hub does not pay for all of them.
    """
    opener: Callable[..., AbstractAsyncContextManager[Source]] = resolve_name(_OPENERS[scheme])
    return opener
