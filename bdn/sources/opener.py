"""Opens the source of a URI with the credentials of the request or of the process.

A new scheme needs a URI in ``core/source/uri.py``, a folder here, a row in ``_OPENERS`` and one in ``environment.py``.
Its bytes must be readable over HTTP. Its endpoints and the process's own credentials are in ``settings.py``, the format
of its secret is in ``sign_in.py``; a new way to sign in is declared in ``wire/mirror_schema.py`` and made in
``mirror/upstream/sign_ins.py``. Its tests inherit ``tests/contract/source_contract.py``; its SDK is added to the import
contracts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Final

from bdn.core.source.upstream import Source
from bdn.core.source.uri import Scheme, SourceUri
from bdn.sources.environment import check_environment
from bdn.sources.sign_in import SourceContext

# Functions with the parameters of ``open_source``.
_OPENERS: Final[Mapping[Scheme, str]] = {
    "hf": "bdn.sources.huggingface.source:open_hugging_face",
    "s3": "bdn.sources.s3.source:open_s3",
    "r2": "bdn.sources.s3.source:open_s3",
    "azure": "bdn.sources.azure.source:open_azure",
    "https": "bdn.sources.https.source:open_https",
    "cw": "bdn.sources.s3.source:open_s3",
    "gs": "bdn.sources.gcs.source:open_gcs",
}


@asynccontextmanager
async def open_source(uri: SourceUri, context: SourceContext) -> AsyncIterator[Source]:
    """Open the source of a URI, without a request.

    Raises:
        SecretMalformedError: the secret does not fit the source.
        AuthRequiredError: the source cannot be read without a sign-in.
        InvalidRequestError: a sign-in of another cloud, or a variable of the environment that cannot be used.
    """
    opener = await asyncio.to_thread(prepare, uri.scheme)
    async with opener(uri, context) as source:
        yield source


def prepare(scheme: Scheme) -> Callable[..., AbstractAsyncContextManager[Source]]:
    """Check the environment and import the scheme's SDK, once. Blocking.

    Raises ``InvalidRequestError``: a variable of the environment cannot be used.
    """
    check_environment(scheme)
    return _imported(scheme)


@cache
def _imported(scheme: Scheme) -> Callable[..., AbstractAsyncContextManager[Source]]:
    """Import the SDK of one scheme only: each costs 250 ms and tens of megabytes."""
    opener: Callable[..., AbstractAsyncContextManager[Source]] = resolve_name(_OPENERS[scheme])
    return opener
