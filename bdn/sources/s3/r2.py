"""R2 is S3 at an address of its own, with one region, and with nothing to see for strangers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bdn.core.errors import AuthRequiredError, InvalidRequestError
from bdn.core.pace.retry import ASK_ONCE
from bdn.core.ports import Asker
from bdn.core.source.weights import BucketUri
from bdn.sources.credentials import S3Credentials, S3CredentialsProvider, Secret, StaticS3Credentials, s3_credentials
from bdn.sources.s3.bucket import connect
from bdn.sources.s3.client import S3Endpoint
from bdn.sources.s3.source import S3Source
from bdn.sources.settings import UpstreamSettings, r2_address
from bdn.sources.sign_in import SignIn

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
