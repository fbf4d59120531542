"""R2 keeps the contract of a Source, against moto behind real signatures for R2's one region. Its buckets are read as S3's."""

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import AuthRequiredError, InvalidRequestError
from bdn.core.source.upstream import Identity, Source, UpstreamFile
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import AwsAssumedRole, AwsRole, S3Credentials, Secret, SignIn
from tests.contract.access_contract import Access, AccessContract
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Server
from tests.doubles.sigv4 import Account
from tests.support.mirror.s3_upstreams import FolderUpstream, S3Access, S3Like, keys_of
from tests.support.network.egress import LOOPBACK

STRANGER = Account("AKIASTRANGER", "stranger")


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server() as server:
        server.accounts[STRANGER.access_key_id] = STRANGER
        server.strangers.add(STRANGER.access_key_id)
        yield server


@pytest.fixture
def server(shared_server: S3Server) -> S3Server:
    shared_server.log.clear()
    return shared_server


@pytest.fixture
def r2(server: S3Server) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, r2_endpoint_url=server.url)
    return S3Like(
        settings, server.account, STRANGER, lambda name, _public: server.bucket(f"r2-{name}", region="auto"), "4cc0"
    )


def opened(uri: str, sign_in: SignIn | None, settings: UpstreamSettings) -> AbstractAsyncContextManager[Source]:
    return open_source(
        parse_source(uri), sign_in=sign_in, organisation="acme", ambient_credentials=False, settings=settings
    )


class TestFolderOfR2(SourceContract):
    @pytest.fixture
    def upstream(self, r2: S3Like) -> Upstream:
        return FolderUpstream(r2, r2.bucket(), "models/a b+c%/")


class TestAccessToR2(AccessContract):
    @pytest.fixture
    def access(self, r2: S3Like) -> Access:
        return S3Access(r2)

    # Nothing of R2 can be listed without keys.
    @pytest.mark.parametrize("way", ["private"])
    async def test_what_may_be_read_is_listed_and_read(self, access: Access, way: str) -> None:
        await super().test_what_may_be_read_is_listed_and_read(access, way)


async def test_nothing_is_asked_without_keys_and_the_process_s_own_aws_keys_are_not_sent(
    r2: S3Like, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = r2.bucket()
    bucket.put({"a.txt": b"x"})
    account = server.account
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", account.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", account.secret_access_key)
    ambient = S3Credentials(account.access_key_id, account.secret_access_key)
    settings = UpstreamSettings(egress=LOOPBACK, r2_endpoint_url=server.url, s3_credentials=ambient)
    async with open_source(
        parse_source(f"r2://4cc0.{bucket.name}"),
        sign_in=None,
        organisation="acme",
        ambient_credentials=True,
        settings=settings,
    ) as source:
        with pytest.raises(AuthRequiredError, match="R2 lists buckets for the owners of keys only"):
            await listed(source)
    assert server.log.count() == 0


async def test_a_region_in_the_secret_changes_nothing(r2: S3Like, server: S3Server) -> None:
    bucket = r2.bucket()
    bucket.put({"a.txt": CONTENT})
    keys = json.loads(keys_of(server.account)) | {"aws_region": "eu-west-1"}
    async with opened(f"r2://4cc0.{bucket.name}", Secret("r2-keys", json.dumps(keys)), r2.settings) as source:
        location = await source.locate((await listed(source))["a.txt"])
    assert "%2Fauto%2Fs3%2F" in location.url
    assert read_range(location, 1, 3).content == CONTENT[1:3]


async def test_a_role_of_aws_does_not_open_r2(r2: S3Like) -> None:
    role = AwsAssumedRole(AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "session"), "external")
    with pytest.raises(InvalidRequestError, match="cannot be read with a role of AWS"):
        async with opened("r2://4cc0.weights", role, r2.settings):
            pass


async def test_the_same_object_of_another_account_is_another_identity(r2: S3Like, server: S3Server) -> None:
    bucket = r2.bucket()
    bucket.put({"a.txt": b"x"})
    keys = set()
    for uri in (f"r2://4cc0.{bucket.name}", f"r2://5dd0.{bucket.name}", f"r2://4cc0.eu.{bucket.name}"):
        async with opened(
            uri,
            Secret("r2-keys", keys_of(server.account)),
            UpstreamSettings(egress=LOOPBACK, r2_endpoint_url=server.url),
        ) as source:
            keys.add((await listed(source))["a.txt"].identity.key)
    assert len(keys) == 3


async def located(uri: str, template: str | None) -> str:
    settings = UpstreamSettings() if template is None else UpstreamSettings(r2_endpoint_url=template)
    async with opened(uri, Secret("r2-keys", keys_of(Account("A", "S"))), settings) as source:
        return await address_of(source)


async def address_of(source: Source) -> str:
    location = await source.locate(UpstreamFile("k", 1, Identity.of("organisation:acme", "r2"), "k", '"etag"'))
    parts = urlsplit(location.url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


@pytest.mark.parametrize(("uri", "template", "expected"), [
    ("r2://4cc0.weights", None, "https://4cc0.r2.cloudflarestorage.com/weights/k"),
    ("r2://4cc0.eu.weights", None, "https://4cc0.eu.r2.cloudflarestorage.com/weights/k"),
    ("r2://4cc0.eu.weights", "https://{account}.{jurisdiction}.r2.test", "https://4cc0.eu.r2.test/weights/k"),
    ("r2://4cc0.weights", "https://{account}.{jurisdiction}.r2.test", "https://4cc0.r2.test/weights/k"),
    ("r2://4cc0.eu.weights", "https://r2-{jurisdiction}.test:8443", "https://r2-eu.test:8443/weights/k"),
    ("r2://4cc0.eu.weights", "https://r2.test/{account}", "https://r2.test/4cc0/weights/k"),
    ("r2://4cc0.eu.weights", "https://r2.test", "https://r2.test/weights/k"),
])  # fmt: skip
async def test_the_address_is_the_account_s_or_what_the_setting_says(
    uri: str, template: str | None, expected: str
) -> None:
    assert await located(uri, template) == expected
