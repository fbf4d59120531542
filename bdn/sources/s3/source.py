"""Buckets of S3, and of what speaks S3."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import AuthRequiredError, InvalidRequestError
from bdn.core.source.upstream import ASK_ONCE, Asker, Identity, Location, Resolution, UpstreamFile
from bdn.core.source.uri import BucketUri
from bdn.core.store import scope_of
from bdn.sources.bucket_tree import BucketTree
from bdn.sources.s3.bucket import S3Bucket, S3Object, connect, stated_checksum
from bdn.sources.s3.client import S3Endpoint
from bdn.sources.s3.role import AwsRoleCredentials
from bdn.sources.s3.signature import CHECKSUM_MODE
from bdn.sources.settings import UpstreamSettings, r2_address
from bdn.sources.sign_in import (
    AwsAssumedRole,
    AwsWebIdentity,
    S3Credentials,
    S3CredentialsProvider,
    Secret,
    SignIn,
    StaticS3Credentials,
    s3_credentials,
)

_AWS: Final = "aws"  # in identities, for every region: names of buckets are unique over all of them


class S3Source:
    """One source of S3, or of what speaks S3. Resolving costs nothing: buckets have no revisions.

    Each 1000 objects cost one request, and each file of more than one chunk another one when it is located.

    Args:
        uri: the bucket and prefix; a prefix without a final slash may name an object, which only the listing tells.
        bucket: the opened bucket, open for as long as this is used.
        place: where the bucket is; identities begin with it.
        organisation: who alone may find the content again by its listing.
    """

    def __init__(self, uri: BucketUri, bucket: S3Bucket, *, place: tuple[str, ...], organisation: str) -> None:
        self._uri = uri
        self._bucket = bucket
        self._tree = BucketTree(uri, bucket)
        self._place = (*place, uri.bucket)
        self._scope = scope_of(organisation)
        self._may_read_versions: bool | None = None  # not known yet

    async def resolve(self) -> Resolution:
        """No revision; whether the bucket exists and may be read is told by the first page of the listing."""
        return Resolution(None)

    async def list(
        self,
        resolution: Resolution,  # noqa: ARG002 - there is none
        within: Sequence[str] = ("",),
    ) -> AsyncIterator[UpstreamFile]:
        """Every object; see ``BucketTree.files``."""
        async for path, entry in self._tree.files(within):
            yield self._file(entry, path)

    async def locate(self, file: UpstreamFile) -> Location:
        """A presigned address, or the plain one for anonymous reading.

        For a file of one chunk it is made without a request, and the answer to the GET states the checksum; that of a
        larger one is asked for here, because S3 does not state it for ranges. ``If-Match`` goes beside the signature, not
        inside it, so that any HTTP client can use the address.
        """
        version_id = checksum = None
        if file.size > CHUNK_SIZE:
            head = await self._bucket.head(file)
            checksum = head.checksum
            if head.version_id is not None and await self._versions_may_be_read(file, head.version_id):
                version_id = head.version_id
        address = await self._bucket.address(file.handle, version_id)
        return Location(
            address.url,
            (("If-Match", file.version), CHECKSUM_MODE),
            etag=file.version,
            expires_at=address.expires_at,
            checksum=checksum,
            stated=stated_checksum if file.size <= CHUNK_SIZE else None,
            may_be_encoded=True,  # S3 gives bytes as they were put, with the encoding that was put with them
        )

    async def _versions_may_be_read(self, file: UpstreamFile, version_id: str) -> bool:
        """Reading a version needs a permission of its own (s3:GetObjectVersion), which many readers do not have.

        Asked once for a source. Without it, If-Match alone pins what is read.
        """
        if self._may_read_versions is None:
            try:
                await self._bucket.head(file, version_id)
            except AuthRequiredError:
                self._may_read_versions = False
            else:
                self._may_read_versions = True
        return self._may_read_versions

    def _file(self, entry: S3Object, path: str) -> UpstreamFile:
        """Without a checksum: an ETag is the MD5 only where KMS is not used, and a listing does not tell."""
        parts = (*self._place, entry.name, entry.etag, str(entry.size))
        return UpstreamFile(path, entry.size, Identity.of(self._scope, *parts), entry.name, entry.etag)


@asynccontextmanager
async def open_s3(
    uri: BucketUri,
    *,
    sign_in: SignIn | None,
    organisation: str,
    ambient_credentials: bool,
    settings: UpstreamSettings,
    clock: Callable[[], float] = time.time,
    asker: Asker = ASK_ONCE,
) -> AsyncIterator[S3Source]:
    """The source, without a request yet; the arguments are those of ``open_source``."""
    credentials: S3CredentialsProvider | None = None
    region: str | None = None
    match sign_in:
        case Secret():
            keys = s3_credentials(sign_in)
            credentials, region = StaticS3Credentials(keys), keys.region
        case AwsWebIdentity() | AwsAssumedRole():
            credentials = AwsRoleCredentials(sign_in, str(uri), settings, clock=clock, asker=asker)
            region = sign_in.role.region
        case None if ambient_credentials and settings.s3_credentials:
            credentials, region = StaticS3Credentials(settings.s3_credentials), settings.s3_credentials.region
        case None:
            pass
        case _:
            raise InvalidRequestError(f"{uri} cannot be read with a service account of Google")
    url = settings.s3_endpoint_url
    endpoint = S3Endpoint(url, region or settings.s3_region, credentials, settings.ca_bundle, settings.egress)
    async with connect(uri, endpoint, asker=asker, clock=clock) as bucket:
        yield S3Source(uri, bucket, place=("s3", url or _AWS), organisation=organisation)


_REGION: Final = "auto"  # the only one that R2 has


@asynccontextmanager
async def open_r2(
    uri: BucketUri,
    *,
    sign_in: SignIn | None,
    organisation: str,
    ambient_credentials: bool,  # noqa: ARG001 - see below
    settings: UpstreamSettings,
    clock: Callable[[], float] = time.time,
    asker: Asker = ASK_ONCE,
) -> AsyncIterator[S3Source]:
    """The source, without a request yet; the arguments are those of ``open_source``.

    The process's own AWS keys are never sent there: they belong to an account with another company.
    """
    credentials: S3CredentialsProvider
    match sign_in:
        case None:
            credentials = _NoKeys(str(uri))
        case Secret():
            credentials = StaticS3Credentials(s3_credentials(sign_in))
        case _:
            raise InvalidRequestError(f"{uri} cannot be read with a role of AWS or a service account of Google")
    address = r2_address(settings.r2_endpoint_url, uri.account, uri.jurisdiction)
    endpoint = S3Endpoint(address, _REGION, credentials, settings.ca_bundle, settings.egress)
    async with connect(uri, endpoint, asker=asker, clock=clock) as bucket:
        place = ("r2", address, uri.account, uri.jurisdiction)
        yield S3Source(uri, bucket, place=place, organisation=organisation)


@dataclass(frozen=True, slots=True)
class _NoKeys:
    """Public buckets of R2 serve objects to everybody, but at other addresses, and never their listing."""

    source: str

    async def get(self) -> S3Credentials:
        raise AuthRequiredError(self.source, "R2 lists buckets for the owners of keys only, public ones too")
