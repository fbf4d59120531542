"""Buckets of Google Cloud Storage, and of emulators that speak its JSON API."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.core.source.upstream import ASK_ONCE, Asker, Identity, Location, Resolution, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.core.store import scope_of
from bdn.sources.bucket_tree import BucketTree
from bdn.sources.gcs.bucket import GcsBucket, GcsEndpoint, GcsObject, connect
from bdn.sources.gcs.tokens import KeyTokens, ServiceAccountTokens, TokenProvider
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import GoogleServiceAccount, Secret, SignIn


class GcsSource:
    """One source of GCS. Resolving costs nothing: buckets have no revisions. Each 1000 objects cost one request.

    Args:
        uri: the bucket and prefix; a prefix without a final slash may name an object, which only the listing tells.
        bucket: the opened bucket, open for as long as this is used.
        endpoint: the address of the server, of which Google's is one.
        organisation: who alone may find the content again by its listing.
    """

    def __init__(self, uri: BucketUri, bucket: GcsBucket, *, endpoint: str, organisation: str) -> None:
        self._uri = uri
        self._bucket = bucket
        self._tree = BucketTree(uri, bucket)
        self._endpoint = endpoint
        self._scope = scope_of(organisation)

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """The live generation of every object; see ``BucketTree.files``."""
        async for path, entry in self._tree.files(within):
            yield self._file(entry, path)

    async def locate(self, file: UpstreamFile) -> Location:
        """The address of this generation. Any other bytes are a 404, so the answers' ``ETag`` need not be compared."""
        return await self._bucket.link(file.handle, file.version)

    def _file(self, entry: GcsObject, path: str) -> UpstreamFile:
        identity = Identity.of(self._scope, "gs", self._endpoint, self._uri.bucket, entry.name, entry.generation)
        return UpstreamFile(path, entry.size, identity, entry.name, entry.generation, entry.checksum)


_AMBIENT: Final = "GOOGLE_APPLICATION_CREDENTIALS"


@asynccontextmanager
async def open_gcs(
    uri: BucketUri,
    *,
    sign_in: SignIn | None,
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
