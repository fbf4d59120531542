"""CoreWeave's object storage keeps the contract of a Source, against moto behind real signatures. Its buckets are read as S3's."""

import pytest

from bdn.core.errors import AuthRequiredError, InvalidRequestError
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import S3Credentials, UpstreamSettings
from bdn.sources.sign_in import AwsAssumedRole, AwsRole, Secret, SourceContext
from tests.contract.access_contract import Access, AccessContract
from tests.contract.opening import STRANGER, S3Like, keys_of
from tests.contract.source_contract import SourceContract, Upstream, listed
from tests.doubles.s3 import S3Server
from tests.doubles.sigv4 import Account
from tests.support.network.egress import LOOPBACK


@pytest.fixture
def coreweave(s3_server: S3Server) -> S3Like:
    settings = UpstreamSettings(egress=LOOPBACK, cw_endpoint_url=s3_server.url)
    return S3Like(
        settings,
        s3_server.account,
        STRANGER,
        lambda name, public: s3_server.bucket(f"cw-{name}", public=public),
        "cw",
    )


class TestFolderOfCoreWeave(SourceContract):
    @pytest.fixture
    def upstream(self, coreweave: S3Like) -> Upstream:
        return coreweave.upstream("models/ü/a b+c%/")


class TestAccessToCoreWeave(AccessContract):
    @pytest.fixture
    def access(self, coreweave: S3Like) -> Access:
        return coreweave.access()


async def test_the_process_s_own_aws_keys_are_not_sent(coreweave: S3Like) -> None:
    account = coreweave.account
    own = S3Credentials(account.access_key_id, account.secret_access_key)
    settings = UpstreamSettings(egress=LOOPBACK, cw_endpoint_url=coreweave.settings.cw_endpoint_url, s3_credentials=own)
    context = SourceContext("acme", settings, ambient_credentials=True)
    async with open_source(parse_source(f"cw://{coreweave.bucket().name}"), context) as source:
        with pytest.raises(AuthRequiredError, match="anonymous reading is not allowed"):
            await listed(source)


async def test_a_role_of_aws_does_not_open_coreweave(coreweave: S3Like) -> None:
    role = AwsAssumedRole(AwsRole("arn:aws:iam::123456789012:role/reader", "us-east-1", "session"), "external")
    with pytest.raises(InvalidRequestError, match="cannot be read with a role of AWS"):
        async with open_source(parse_source("cw://weights"), SourceContext("acme", coreweave.settings, role)):
            pass


@pytest.mark.parametrize(("settings", "expected"), [
    (UpstreamSettings(s3_addressing="path"), "https://weights.cwobject.com/a%20b?"),
    (UpstreamSettings(cw_endpoint_url="http://cwlota.com"), "http://weights.cwlota.com/a%20b?"),
])  # fmt: skip
async def test_the_bucket_is_in_the_host_s_name(settings: UpstreamSettings, expected: str) -> None:
    context = SourceContext("acme", settings, Secret("cw-keys", keys_of(Account("A", "S"))))
    async with open_source(parse_source("cw://weights"), context) as source:
        location = await source.locate(UpstreamFile("a b", 1, Identity.of("organisation:acme", "cw"), "a b", '"etag"'))
    assert location.url.startswith(expected)
