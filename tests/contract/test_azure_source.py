"""Containers of Azure keep the contract of a source and of a bucket: our double, and the real server azurite."""

import json
from base64 import b64encode
from collections.abc import Iterator

import pytest

from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    EgressRefusedError,
    SecretMalformedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.core.source.uri import BucketUri, parse_source
from bdn.sources.azure.source import container_token, read_page, read_refusal
from bdn.sources.bucket_source import NotAListingError
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.bucket_contract import Bucket, BucketContract
from tests.contract.opening import NUMBERS, BucketUpstream, Opened
from tests.contract.source_contract import CONTENT, SourceContract, Upstream, listed, only_file, seen_before
from tests.doubles.azure import ACCOUNT, KEY, AzureLike, AzureServer, AzuriteServer, container_sas, refused
from tests.doubles.faults import Fault, answer, drop, truncate
from tests.doubles.ranges import read_range
from tests.support.network.egress import LOOPBACK
from tests.support.network.egress_streets import Names

OWNER = json.dumps({"account_key": KEY})


@pytest.fixture(scope="module")
def double() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


@pytest.fixture
def azure(double: AzureServer) -> AzureServer:
    double.script.clear()
    double.log.clear()
    return double


@pytest.fixture(scope="module", params=["double", "azurite"])
def server(request: pytest.FixtureRequest) -> Iterator[AzureLike]:
    if request.param == "double":
        yield request.getfixturevalue("double")
        return
    if not AzuriteServer.is_installed:
        pytest.skip("azurite is not installed: make azurite, where npm is there")
    with AzuriteServer() as azurite:
        yield azurite


def opened(server: AzureLike, container: str, prefix: str = "", secret: str | None = OWNER) -> Opened:
    settings = UpstreamSettings(egress=LOOPBACK, azure_endpoint_url=server.url)
    context = SourceContext("acme", settings, Secret("azure-key", secret) if secret else None)
    return open_source(BucketUri("azure", container, prefix, ACCOUNT), context)


def upstream_of(server: AzureLike, folder: str = "") -> BucketUpstream:
    container = server.container(f"container-{next(NUMBERS)}")
    return BucketUpstream(container, lambda prefix: opened(server, container.name, prefix), folder)


OTHERWISE_IN_AZURITE = {
    "test_a_range_behind_the_end_is_refused": "azurite does not refuse each range behind the end",
    "test_a_path_that_must_not_become_a_file_is_listed_for_the_selector_to_refuse": "azurite takes no such names",
}


class TestFolderOfAzure(SourceContract):
    @pytest.fixture
    def upstream(self, request: pytest.FixtureRequest, server: AzureLike) -> Upstream:
        if isinstance(server, AzuriteServer) and (reason := OTHERWISE_IN_AZURITE.get(request.node.originalname)):
            pytest.skip(reason)
        return upstream_of(server, "models/ü/a b+c%/")


class TestContainer(BucketContract):
    @pytest.fixture
    def bucket(self, server: AzureLike) -> Bucket:
        return upstream_of(server)


class TestAccessToAzure(AccessContract):
    @pytest.fixture
    def access(self, server: AzureLike) -> Access:
        def opened_by(way: str) -> Opened:
            container = server.container(f"access-{next(NUMBERS)}", public=way == "public")
            container.put({"a.txt": b"x"})
            secrets = {"private": OWNER, "missing": OWNER}
            secrets["wrong key"] = json.dumps({"account_key": b64encode(SESAME.encode()).decode()})
            secrets["denied"] = json.dumps({"sas_token": container_sas(container.name, "r")})
            return opened(server, "no-such" if way == "missing" else container.name, secret=secrets.get(way))

        return opened_by


async def test_a_sas_token_opens_its_container(server: AzureLike) -> None:
    container = server.container(f"sas-{next(NUMBERS)}")
    container.put({"a b/ü.bin": CONTENT})
    secret = json.dumps({"sas_token": f"?{container_sas(container.name, 'rl')}"})
    async with opened(server, container.name, "a b/ü.bin", secret) as source:
        location = await source.locate(await only_file(source))
    assert read_range(location, 3, 9).content == CONTENT[3:9]
    assert location.expires_at is None


def test_a_token_is_signed_as_the_official_client_signs_it() -> None:
    """The signature is what azure-storage-blob 12.31.1 made of these values."""
    token = container_token("acct", "cont", b"k" * 64, 1893456000)
    assert token.endswith("sig=2oXIW2xHjVoFBhbAru7ckacylEZWN6AwaDB%2Bw464XFA%3D")


async def test_a_signed_address_expires_in_an_hour(azure: AzureServer) -> None:
    azure.container("expiring").put({"a.bin": b"x"})
    settings = UpstreamSettings(egress=LOOPBACK, azure_endpoint_url=azure.url)
    context = SourceContext("acme", settings, Secret("azure-key", OWNER), clock=lambda: 4e9)
    async with open_source(BucketUri("azure", "expiring", "", ACCOUNT), context) as source:
        assert (await source.locate(await only_file(source))).expires_at == 4e9 + 3600


async def test_directories_of_a_hierarchical_namespace_are_not_files(azure: AzureServer) -> None:
    container = azure.container("hierarchy")
    container.put({"m/sub/a.bin": b"x", "m.txt": b"x"})
    container.directories |= {"m", "m/sub", "m/empty"}
    for prefix, expected in (("", {"m/sub/a.bin", "m.txt"}), ("m", {"sub/a.bin"})):
        async with opened(azure, "hierarchy", prefix) as source:
            assert set(await listed(source)) == expected


async def test_the_md5_that_a_writer_stated_is_the_checksum(azure: AzureServer) -> None:
    azure.container("checked").put({"a.bin": b"x"})
    async with opened(azure, "checked") as source:
        file = await only_file(source)
    assert file.checksum == Checksum(ChecksumKind.MD5, "9dd4e461268c8034f5c8564e155c67a6")


def fault_of(status: int, code: str, headers: dict[str, str] | None = None) -> Fault:
    refusal = refused(status, code, headers)
    assert isinstance(refusal.content, bytes)
    return answer(status, refusal.headers, refusal.content)


FAILURES = [
    (fault_of(403, "AuthenticationFailed"), AuthRequiredError, "403 AuthenticationFailed: the secret's key or token is wrong"),
    (fault_of(403, "AuthorizationPermissionMismatch"), AuthRequiredError, "needs the permissions Read and List"),
    (fault_of(403, "AuthorizationFailure"), AuthRequiredError, "network rules"),
    (fault_of(401, "NoAuthenticationInformation"), AuthRequiredError, "401"),
    (fault_of(404, "ContainerNotFound"), SourceNotFoundError, "404 ContainerNotFound"),
    (fault_of(429, "TooManyRequests", {"Retry-After": "7"}), UpstreamRateLimitedError, "wait 7 s"),
    (fault_of(503, "ServerBusy", {"Retry-After": "7"}), UpstreamRateLimitedError, "wait 7 s"),
    (fault_of(500, "InternalError"), UpstreamUnavailableError, "500 InternalError"),
    (fault_of(500, "<b>anything</b>"), UpstreamUnavailableError, "Azure answered 500$"),
    (answer(200, body=b"<html>"), UpstreamUnavailableError, "not XML"),
    (answer(200, body=b"<html/>"), UpstreamUnavailableError, "a document 'html'"),
    (answer(302, {"Location": "http://10.0.0.1/"}), EgressRefusedError, "private address"),
    (truncate(10), UpstreamUnavailableError, "127.0.0.1"),
    (drop(), UpstreamUnavailableError, "127.0.0.1"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), FAILURES)
@pytest.mark.parametrize(("query", "before"), [("", 0), ("marker=", 1000)])
async def test_a_failing_page_is_mapped_around_the_iteration(
    azure: AzureServer, fault: Fault, expected: type[BdnError], said: str, query: str, before: int
) -> None:
    azure.container("failing").put({f"{number:04}.txt": b"" for number in range(1500)})
    azure.fail(fault, query, times=None)
    assert len(await seen_before(expected, said, opened(azure, "failing"))) == before


async def test_an_account_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch)
    async with open_source(parse_source("azure://nobody/weights"), SourceContext("acme", UpstreamSettings())) as source:
        with pytest.raises(UpstreamUnavailableError, match=r"nobody\.blob\.core\.windows\.net.*does not exist"):
            await listed(source)


@pytest.mark.parametrize(("code", "said"), [
    ("BlobArchived", "archived.*set-tier"), ("BlobBeingRehydrated", "archived"),
    ("BlobUsesCustomerSpecifiedEncryption", "customer-provided key"),
])  # fmt: skip
def test_a_blob_that_no_address_reads_is_named_with_its_remedy(code: str, said: str) -> None:
    content = refused(409, code).content
    assert isinstance(content, bytes)
    error = read_refusal("azure://a/c", "a.bin", 409, content)
    assert error is not None
    with pytest.raises(BdnError, match=said):
        raise error
    assert not error.transient
    assert read_refusal("azure://a/c", "a.bin", 403, b"<Code>Other</Code>") is None


@pytest.mark.parametrize("blob", [
    "<Blob/>", "<Blob><Name>a</Name></Blob>",
    "<Blob><Name>a</Name><Properties><Etag>1</Etag><Content-Length>-1</Content-Length></Properties></Blob>",
    "<Blob><Name></Name><Properties><Etag>1</Etag><Content-Length>1</Content-Length></Properties></Blob>",
])  # fmt: skip
def test_an_entry_that_cannot_be_a_blob_is_refused(blob: str) -> None:
    with pytest.raises(NotAListingError):
        read_page(f"<EnumerationResults><Blobs>{blob}</Blobs></EnumerationResults>".encode())


@pytest.mark.parametrize(
    "value", ["plain", "{}", '{"account_key": "not base64!"}', '{"sas_token": "sv=1"}', '{"sas_token": "sig=a b"}']
)
async def test_a_malformed_secret_is_refused_without_being_shown(azure: AzureServer, value: str) -> None:
    with pytest.raises(SecretMalformedError, match="azure-key"):
        async with opened(azure, "any", secret=value):
            pass
