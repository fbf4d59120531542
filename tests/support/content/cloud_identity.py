"""Clouds that trust a mirror: AWS STS and Google's token services beside their buckets, and a mirror that is their issuer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bdn.mirror.upstream.issuer import new_identity_key
from bdn.net.api_server import bind_tcp, serving
from tests.doubles.gcs import GcsServer
from tests.doubles.google_sts import GoogleTokenServer
from tests.doubles.openid import OpenIdReader
from tests.doubles.s3 import S3Server
from tests.doubles.sts import StsServer
from tests.fakes.clock import Clock
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source

ISSUER = "https://mirror.example.test"
ROLE = "arn:aws:iam::123456789012:role/team/weights-reader"
ASSUMED_ROLE = "arn:aws:iam::210987654321:role/for-bdn"
REGION = "eu-west-1"
POOL = "projects/1234567/locations/global/workloadIdentityPools/bdn-pool"
PROVIDER = f"{POOL}/providers/bdn-provider"
SUBJECTS = "v=1:org=default:job=*:type=mirror"


@dataclass
class Clouds:
    """Both clouds trust the mirror at ``ISSUER``, for the organisation ``default``."""

    clock: Clock
    reader: OpenIdReader
    sts: StsServer
    google: GoogleTokenServer
    s3: S3Server
    gcs: GcsServer


@asynccontextmanager
async def trusted_mirror(clouds: Clouds, data_dir: Path, **options: Any) -> AsyncIterator[MirrorUnderTest]:
    """A mirror whose documents the clouds can read at ``ISSUER``, on the clouds' clock."""
    options = {"issuer_url": ISSUER, "clock": clouds.clock, "identity_key_file": identity_key_file(), **options}
    async with mirror_under_test(data_dir, **options) as mirror:
        listener = bind_tcp("127.0.0.1", 0)
        clouds.reader.reach[ISSUER] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(mirror.service.api, listener):
            yield mirror


_KEPT = TemporaryDirectory(prefix="bdn-test-")


@cache
def identity_key_file() -> Path:
    """One key for all mirrors of the process: making one takes a tenth of a second."""
    path = Path(_KEPT.name) / "identity.pem"
    path.write_bytes(new_identity_key())
    return path


def aws_oidc(uri: str, mount: str = "/aws-oidc", role: str = ROLE, region: str = REGION) -> Json:
    auth = {"auth_method": "AWS_OIDC", "aws_oidc_role_arn": role, "aws_oidc_region": region}
    return source(uri, mount, auth=auth)


def aws_assume_role(uri: str, mount: str = "/aws-role", role: str = ASSUMED_ROLE, region: str = REGION) -> Json:
    auth = {"auth_method": "AWS_ASSUME_ROLE", "aws_assume_role_arn": role, "aws_assume_role_region": region}
    return source(uri, mount, auth=auth)


def gcp_oidc(uri: str, account: str, mount: str = "/gcp-oidc", provider: str = PROVIDER) -> Json:
    auth = {"auth_method": "GCP_OIDC", "gcp_oidc_service_account": account, "gcp_oidc_workload_id_provider": provider}
    return source(uri, mount, auth=auth)
