"""R2 keeps the contract of a Source, against moto behind real signatures for R2's one region. Its buckets are read as S3's."""

import json
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import AuthRequiredError, InvalidRequestError
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import S3Credentials, UpstreamSettings
from bdn.sources.sign_in import AwsAssumedRole, AwsRole, Secret, SignIn, SourceContext
from tests.contract.access_contract import Access, AccessContract
from tests.contract.opening import STRANGER, Opened, S3Like, keys_of
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed
from tests.doubles.ranges import read_range
from tests.doubles.s3 import S3Server
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK


@pytest.fixture
def r2(s3_server: S3Server) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, r2_endpoint_url=s3_server.url)
    return S3Like(
        settings,
        s3_server.account,
        STRANGER,
        lambda name, _: s3_server.bucket(f"r2-{name}", region="auto"),
        "r2",
        "4cc0",
    )


def opened(uri: str, sign_in: SignIn | None, settings: UpstreamSettings, *, ambient: bool = False) -> Opened:
    return open_source(parse_source(uri), SourceContext("acme", settings, sign_in, ambient_credentials=ambient))


class TestFolderOfR2(SourceContract):
    @pytest.fixture
    def upstream(self, r2: S3Like) -> Upstream:
        return r2.upstream("models/ü/a b+c%/")


class TestAccessToR2(AccessContract):
    readable = ("private",)  # nothing of R2 can be listed without keys

    @pytest.fixture
    def access(self, r2: S3Like) -> Access:
        return r2.access()


async def test_nothing_is_asked_without_keys_and_the_process_s_own_aws_keys_are_not_sent(
    r2: S3Like, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = s3_server.account
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", account.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", account.secret_access_key)
    own = S3Credentials(account.access_key_id, account.secret_access_key)
    settings = UpstreamSettings(egress=LOOPBACK, r2_endpoint_url=s3_server.url, s3_credentials=own)
    async with opened(f"r2://4cc0.{r2.bucket().name}", None, settings, ambient=True) as source:
        with pytest.raises(AuthRequiredError, match="R2 lists buckets for the owners of keys only"):
            await listed(source)
    assert s3_server.log.count() == 0


async def test_a_region_in_the_secret_changes_nothing(r2: S3Like, s3_server: S3Server) -> None:
    bucket = r2.bucket()
    bucket.put({"a.txt": CONTENT})
    keys = json.loads(keys_of(s3_server.account)) | {"aws_region": "eu-west-1"}
    async with opened(f"r2://4cc0.{bucket.name}", Secret("r2-keys", json.dumps(keys)), r2.settings) as source:
        location = await source.locate((await listed(source))["a.txt"])
    assert "%2Fauto%2Fs3%2F" in location.url
    assert read_range(location, 1, 3).content == CONTENT[1:3]


async def test_a_role_of_aws_does_not_open_r2(r2: S3Like) -> None:
    role = AwsAssumedRole(AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "session"), "external")
    with pytest.raises(InvalidRequestError, match="cannot be read with a role of AWS"):
        async with opened("r2://4cc0.weights", role, r2.settings):
            pass


async def test_the_same_object_of_another_account_is_another_identity(r2: S3Like, s3_server: S3Server) -> None:
    bucket = r2.bucket()
    bucket.put({"a.txt": b"x"})
    keys = set()
    for account in ("4cc0", "5dd0", "4cc0.eu"):
        secret = Secret("r2-keys", keys_of(s3_server.account))
        async with opened(f"r2://{account}.{bucket.name}", secret, r2.settings) as source:
            keys.add((await listed(source))["a.txt"].identity.key)
    assert len(keys) == 3


@pytest.mark.parametrize(("settings", "expected"), [  # the forms of a template: tests/unit/sources/test_settings.py
    (UpstreamSettings(), "https://4cc0.eu.r2.cloudflarestorage.com/weights/k"),
    (UpstreamSettings(r2_endpoint_url="https://r2.test/{account}"), "https://r2.test/4cc0/weights/k"),
])  # fmt: skip
async def test_the_address_is_the_account_s_or_what_the_setting_says(settings: UpstreamSettings, expected: str) -> None:
    async with opened("r2://4cc0.eu.weights", Secret("r2-keys", keys_of(Account("A", "S"))), settings) as source:
        location = await source.locate(UpstreamFile("k", 1, Identity.of("organisation:acme", "r2"), "k", '"etag"'))
    parts = urlsplit(location.url)
    assert f"{parts.scheme}://{parts.netloc}{parts.path}" == expected
