"""A file at an https address: the contract of a source, and what a server has to state, refuse and send."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import unquote

import pytest

from bdn.core.egress import EgressPolicy
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    EgressRefusedError,
    InvalidSourceError,
    SecretMalformedError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import HttpsUri, parse_source
from bdn.mirror.ingest.copier import Copier
from bdn.mirror.upstream.budget import UpstreamBudgets
from bdn.mirror.upstream.reader import LocatedFile, UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.net.http1.pool import ConnectionPool
from bdn.net.unreachable import UpstreamUntrustedError
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import RangedReader
from bdn.transfer.under_way import UnderWay
from tests.contract.access_contract import SESAME, Access, AccessContract
from tests.contract.opening import Opened
from tests.contract.source_contract import FileContract, Upstream, listed, only_file
from tests.doubles.faults import (
    Fault,
    altered,
    answer,
    drop,
    gzipped,
    ignore_range,
    rate_limited,
    right_after,
    truncate,
)
from tests.doubles.http_origin import Answer, Origin, Request
from tests.doubles.ranges import read_range
from tests.support.content.memory_store import MemoryStore
from tests.support.content.noise import MIB, noise
from tests.support.network.authority import Authority, new_authority
from tests.support.network.egress import LOOPBACK
from tests.support.network.raw_server import RawServer, answering, message
from tests.support.network.tunnels import over_tls

LARGE = noise(17 * MIB + 3, 1)
BEARER, BASIC = json.dumps({"bearer_token": "key"}), json.dumps({"username": "ü", "password": "key"})


@dataclass
class Files:
    """What a server of files holds, by decoded path; those below ``/private`` need an ``Authorization`` in ``keys``."""

    held: dict[str, bytes] = field(default_factory=dict)
    keys: tuple[str, ...] = ("Bearer key", "Basic " + b64encode("ü:key".encode()).decode())
    pin: str = "etag"  # or "weak", "bare", "modified"

    def respond(self, request: Request) -> Answer:
        path = unquote(request.target)
        if path.startswith("/private/") and request.headers.get("authorization") not in self.keys:
            return Answer(401 if "authorization" not in request.headers else 403)
        content = self.held.get(path)
        if content is None:
            return Answer(404)
        digest = sha256(content).hexdigest()[:16]
        day = f"{int(digest, 16) % 28 + 1:02}"
        stated = {
            "etag": ("ETag", f'"{digest}"'),
            "weak": ("ETag", f'W/"{digest}"'),
            "bare": ("ETag", digest),
            "modified": ("Last-Modified", f"Mon, {day} Jan 2024 00:00:00 GMT"),
        }
        name, value = stated[self.pin]
        pinned = request.headers.get("if-match" if name == "ETag" else "if-unmodified-since", value)
        if pinned != value:
            return Answer(412)
        size = len(content) if request.method == "HEAD" else None
        return Answer(200, {name: value}, b"" if size else content, ranged=True, size=size)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "localhost", "127.0.0.1")


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
def server(files: Files, authority: Authority) -> Iterator[Origin]:
    with Origin("files", files.respond, tls=authority.server) as origin:
        yield origin


def opened(server: Origin, path: str, secret: str | None = None, egress: EgressPolicy = LOOPBACK) -> Opened:
    settings = UpstreamSettings(egress=egress)
    context = SourceContext("acme", settings, Secret("file-key", secret) if secret else None)
    return open_source(parse_source(f"{server.url}{path}"), context)


@dataclass(frozen=True)
class OneFile:
    files: Files
    server: Origin

    def fill(self, files: Mapping[str, bytes]) -> None:
        self.files.held |= {f"/{path}": content for path, content in files.items()}

    def open(self) -> Opened:
        return opened(self.server, "/weights.bin")


class TestFileOfAnEtag(FileContract):
    @pytest.fixture
    def upstream(self, files: Files, server: Origin) -> Upstream:
        return OneFile(files, server)


class TestFileOfALastModified(FileContract):
    @pytest.fixture
    def upstream(self, files: Files, server: Origin) -> Upstream:
        files.pin = "modified"
        return OneFile(files, server)


class TestAccess(AccessContract):
    @pytest.fixture(params=[BEARER, BASIC])
    def access(self, request: pytest.FixtureRequest, files: Files, server: Origin) -> Access:
        files.held = {"/public/a.txt": b"x", "/private/a.txt": b"x"}
        secrets = {"private": request.param, "missing": request.param}
        secrets |= {"wrong key": json.dumps({"bearer_token": SESAME}), "denied": json.dumps({"bearer_token": "other"})}
        folders = {"public": "public", "missing": "missing"}
        return lambda way: opened(server, f"/{folders.get(way, 'private')}/a.txt", secrets.get(way))


@pytest.mark.parametrize(("path", "asked", "name"), [
    ("/a/plain.bin", "/a/plain.bin", "plain.bin"),
    ("/a b/ü c%.bin", "/a%20b/%C3%BC%20c%.bin", "ü c%.bin"),
    ("/a%20b/%C3%BC.bin", "/a%20b/%C3%BC.bin", "ü.bin"),
    ("/v%401/x+(1),[2];=$!*~.bin", "/v%401/x+(1),%5B2%5D;=$!*~.bin", "x+(1),[2];=$!*~.bin"),
])  # fmt: skip
async def test_a_path_is_sent_encoded_and_its_last_segment_is_the_file(
    files: Files, server: Origin, path: str, asked: str, name: str
) -> None:
    files.held[unquote(asked)] = b"content"
    async with opened(server, path) as source:
        file = await only_file(source)
        assert (file.path, file.size) == (name, 7)
        assert read_range(await source.locate(file), 0, 7).content == b"content"
        assert [one async for one in source.list(await source.resolve(), ("other",))] == []
    assert {request.target for request in server.log.find()} == {asked}


@pytest.mark.parametrize(("fault", "asked"), [
    (answer(405), ["HEAD", "GET"]), (answer(403), ["HEAD", "GET"]), (answer(501), ["HEAD", "GET"]),
    (altered({"Content-Encoding": "gzip"}), ["HEAD", "GET"]), (answer(200, {"Content-Encoding": "br"}), ["HEAD", "GET"]),
    (answer(200, body=b""), ["HEAD", "GET"]), (None, ["HEAD"]),
])  # fmt: skip
@pytest.mark.parametrize("content", [b"content", b""])
async def test_where_head_says_too_little_one_byte_is_requested(
    files: Files, server: Origin, fault: Fault | None, asked: list[str], content: bytes
) -> None:
    files.held["/a.bin"] = content
    if fault:
        server.script.add(fault, method="HEAD")
    async with opened(server, "/a.bin") as source:
        assert (await only_file(source)).size == len(content)
    requests = server.log.find()
    assert [request.method for request in requests] == asked
    assert [request.headers["range"] for request in requests if request.method == "GET"] == ["bytes=0-0"] * (
        len(asked) - 1
    )
    assert {request.bytes_served for request in requests} <= {0, 1}


def stated(*headers: str) -> Fault:
    """A whole file with these headers alone."""
    return answer(200, dict(header.split(": ") for header in headers), b"content")


REFUSALS = [
    (stated("Content-Type: text/html"), InvalidSourceError, "neither ETag nor Last-Modified.*put the file into a bucket"),
    (stated('ETag: "1"', "Content-Encoding: gzip"), InvalidSourceError, "Content-Encoding 'gzip'"),
    (answer(404), SourceNotFoundError, "answered 404"),
    (answer(410), SourceNotFoundError, "answered 410"),
    (answer(451), SourceNotFoundError, "answered 451"),
    (answer(401), AuthRequiredError, "401: anonymous reading is not allowed"),
    (answer(403), AuthRequiredError, "auth_secret_name"),
    (rate_limited(7), UpstreamRateLimitedError, "wait 7 s"),
    (answer(503, {"Retry-After": "7"}), UpstreamUnavailableError, "answered 503"),
    (answer(500), UpstreamUnavailableError, "answered 500"),
    (drop(), UpstreamUnavailableError, "localhost: "),
    (answer(302, {"Location": "http://localhost/plain"}), UpstreamUntrustedError, "redirects from https to http"),
    (answer(302, {"Location": "/a.bin"}), UpstreamUnavailableError, "more than 5 redirects"),
    (answer(302, {"Location": "https://10.0.0.1/secrets"}), EgressRefusedError, "it is a private address"),
    (answer(302, {"Location": "https://169.254.169.254/"}), EgressRefusedError, "metadata"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "expected", "said"), REFUSALS)
async def test_a_file_that_cannot_be_copied_is_refused_with_what_to_do(
    files: Files, server: Origin, fault: Fault, expected: type[BdnError], said: str
) -> None:
    files.held["/a.bin"] = b"content"
    server.fail(fault, times=None)
    async with opened(server, "/a.bin") as source:
        with pytest.raises(expected, match=said) as raised:
            await listed(source)
    assert raised.value.details().get("retry_after_seconds") == (7 if fault.headers.get("Retry-After") else None)


async def test_a_file_without_a_length_is_refused(files: Files, authority: Authority) -> None:
    chunked = message(
        "200 OK", 'ETag: "1"', "Transfer-Encoding: chunked", "Connection: close", body=b"1\r\nx\r\n0\r\n\r\n"
    )
    head = message("200 OK", 'ETag: "1"', "Connection: close")
    with RawServer(*(over_tls(authority.server, answering(one)) for one in (head, chunked))) as raw:
        uri = parse_source(raw.url.replace("http://127.0.0.1", "https://localhost") + "/a.bin")
        async with open_source(uri, SourceContext("acme", UpstreamSettings(egress=LOOPBACK))) as source:
            with pytest.raises(InvalidSourceError, match="does not state its length"):
                await listed(source)


async def test_credentials_stay_with_the_host_that_they_are_for(
    files: Files, server: Origin, authority: Authority
) -> None:
    with Origin("other", files.respond, tls=authority.server) as other:
        server.fail(answer(302, {"Location": f"{other.url}/public.bin"}), times=None)
        files.held["/public.bin"] = b"public"
        async with opened(server, "/private/a.bin", BEARER) as source:
            file = await only_file(source)
            assert (file.path, file.size) == ("a.bin", 6)
        assert [request.headers.get("authorization") for request in server.log.find()] == ["Bearer key"]
        assert [request.headers.get("authorization") for request in other.log.find()] == [None]


@pytest.mark.parametrize(
    "value", ["plain", "[]", "{}", '{"username": "u"}', '{"bearer_token": "a b"}', '{"bearer_token": 7}']
)
async def test_a_malformed_secret_is_refused_without_being_shown(server: Origin, value: str) -> None:
    with pytest.raises(SecretMalformedError, match="file-key"):
        async with opened(server, "/a.bin", value):
            pass


Copy = Callable[[str], Awaitable[bytes]]


@pytest.fixture
async def copy(server: Origin) -> AsyncIterator[Copy]:
    """Copies a file of the server as the mirror does, without waiting between tries."""

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    with closing(ConnectionPool(timeout_seconds=10)) as pool, closing(ByteThreads(2, "test")) as threads:
        reader = UpstreamReader(RangedReader(pool), threads, UpstreamRetries(UpstreamBudgets(pause=pause)))

        async def copied(path: str) -> bytes:
            async with opened(server, path) as source:
                located = LocatedFile("the source", source, await only_file(source))
                store = MemoryStore()
                layout = await Copier(store, reader).copy(located, {}, store.put, lambda *_: None, UnderWay())
            return b"".join(store.open(chunk.digest).read() for chunk in layout.placed())

        yield copied


@pytest.mark.parametrize("pin", ["etag", "weak", "bare", "modified"])
@pytest.mark.parametrize(
    "fault", [None, answer(503), rate_limited(0), drop(), truncate(1000), gzipped(), ignore_range()]
)
async def test_a_file_is_copied_whole_through_failures_that_pass(
    files: Files, server: Origin, copy: Copy, pin: str, fault: Fault | None
) -> None:
    files.held["/a.bin"], files.pin = LARGE, pin
    if fault:
        server.script.add(fault, method="GET", skip=1)
    assert await copy("/a.bin") == LARGE


async def test_a_server_that_ignores_ranges_is_read_in_order(files: Files, server: Origin, copy: Copy) -> None:
    files.held["/a.bin"] = LARGE
    server.script.add(ignore_range(), method="GET", times=None)
    assert await copy("/a.bin") == LARGE


@pytest.mark.parametrize("pin", ["etag", "weak", "bare", "modified"])
async def test_a_file_that_changes_between_two_ranges_is_refused(
    files: Files, server: Origin, copy: Copy, pin: str
) -> None:
    files.held["/a.bin"], files.pin = LARGE, pin

    def change() -> None:
        files.held["/a.bin"] = bytes(len(LARGE))

    server.script.add(right_after(change), method="GET", skip=2)
    with pytest.raises(SourceChangedError, match="mirror it again"):
        await copy("/a.bin")


async def test_a_server_that_ignores_pins_is_refused_when_its_file_changed(
    files: Files, server: Origin, copy: Copy
) -> None:
    files.held["/a.bin"], files.pin = LARGE, "modified"
    changed = altered({"Last-Modified": "Tue, 30 Jan 2024 00:00:00 GMT"})
    server.script.add(changed, method="GET", times=None)
    with pytest.raises(SourceChangedError, match="its Last-Modified changed"):
        await copy("/a.bin")


def test_an_address_is_a_source() -> None:
    assert parse_source("https://host:8443/a/b.bin") == HttpsUri("host:8443", "a/b.bin")
