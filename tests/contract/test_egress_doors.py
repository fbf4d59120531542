"""The egress guard at each way out of the mirror, with the real clients."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing

import aiohttp
import pytest
from huggingface_hub import close_session

from bdn.core.chunk import ByteRange
from bdn.core.egress import EgressPolicy
from bdn.core.errors import EgressRefusedError
from bdn.core.source.upstream import Location
from bdn.core.source.uri import parse_source
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.gcs.tokens import KeyTokens, ServiceAccountTokens
from bdn.sources.guarded_connector import guarded_connector
from bdn.sources.opener import open_source
from bdn.sources.s3.role import AwsRoleCredentials
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Assertion, AwsRole, AwsWebIdentity, GoogleServiceAccount, Secret
from bdn.transfer.ranged import RangedReader, RangeRequest
from tests.contract.egress_contract import Door, EgressContract, FollowingEgressContract
from tests.doubles.gcs_accounts import GoogleAccount

ASSERTION = Assertion(lambda _: "token", "https://mirror.example", "org:acme:*")


async def survey(uri: str, settings: UpstreamSettings) -> None:
    """All that a source is asked before bytes are read."""
    async with open_source(
        parse_source(uri), sign_in=None, organisation="acme", ambient_credentials=False, settings=settings
    ) as source:
        async for _ in source.list(await source.resolve()):
            pass


class TestRanges(EgressContract):
    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            with closing(ConnectionPool(timeout_seconds=10, egress=policy)) as connections:
                request = RangeRequest("s3://bucket", "file", ByteRange(0, 1), 1)
                await asyncio.to_thread(
                    RangedReader(connections).read_into, Location(f"{url}/file"), request, memoryview(bytearray(1))
                )

        return ask


class TestHuggingFace(FollowingEgressContract):
    @pytest.fixture(autouse=True)
    def session(self) -> Iterator[None]:
        """Proxies are those of the environment in which the session is made."""
        close_session()
        yield
        close_session()

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            close_session()
            await survey("hf://org/model", UpstreamSettings(hf_endpoint=url, egress=policy))

        return ask


class TestS3(EgressContract):
    follows_redirects = False

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            await survey("s3://bucket", UpstreamSettings(s3_endpoint_url=url, egress=policy))

        return ask


class TestGoogleCloudStorage(EgressContract):
    follows_redirects = False

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            await survey("gs://bucket", UpstreamSettings(gcs_endpoint_url=url, egress=policy))

        return ask


class TestSts(EgressContract):
    follows_redirects = False

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            role = AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "bdn")
            settings = UpstreamSettings(sts_endpoint_url=url, egress=policy)
            await AwsRoleCredentials(AwsWebIdentity(role, ASSERTION), "s3://bucket", settings).get()

        return ask


class TestGoogleSts(EgressContract):
    follows_redirects = False

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            provider = "projects/1/locations/global/workloadIdentityPools/pool/providers/mirror"
            account = GoogleServiceAccount("reader@project.iam.gserviceaccount.com", provider, ASSERTION)
            settings = UpstreamSettings(google_sts_url=url, egress=policy)
            await ServiceAccountTokens(account, "gs://bucket", settings).token()

        return ask


class TestServiceAccountKeys(EgressContract):
    follows_redirects = False

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            secret = Secret("key", json.dumps(GoogleAccount("egress").short_key()))
            settings = UpstreamSettings(google_token_url=url, egress=policy)
            await KeyTokens(secret, "gs://bucket", settings).token()

        return ask

    async def test_the_address_in_a_users_secret_is_judged(self, attempts: list[str]) -> None:
        key = GoogleAccount("egress").key("https://169.254.169.254/computeMetadata/v1/token")
        with pytest.raises(EgressRefusedError, match="metadata"):
            await KeyTokens(Secret("key", json.dumps(key)), "gs://bucket", UpstreamSettings()).token()
        assert not attempts


class TestAiohttp(FollowingEgressContract):
    """Whatever else asks through aiohttp, redirects included."""

    @pytest.fixture
    def door(self) -> Door:
        async def ask(url: str, policy: EgressPolicy) -> None:
            async with (
                aiohttp.ClientSession(
                    connector=guarded_connector(policy), trust_env=True, raise_for_status=True
                ) as session,
                session.get(url),
            ):
                pass

        return ask
