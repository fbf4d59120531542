"""Failures on the way to an upstream that do not pass: no host of this name, a certificate that is not trusted."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.errors import UpstreamUnavailableError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.upstream import Identity, Location, UpstreamFile
from bdn.core.source.uri import parse_source
from bdn.mirror.upstream.budget import UpstreamBudgets
from bdn.mirror.upstream.reader import FileRange, LocatedFile, UpstreamReader
from bdn.mirror.upstream.retries import UpstreamRetries
from bdn.net.http1.pool import ConnectionPool
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.ranged import RangedReader
from tests.contract.source_contract import listed
from tests.support.network.authority import new_authority
from tests.support.network.egress import LOOPBACK
from tests.support.network.egress_streets import Names
from tests.support.network.raw_server import RawServer, answering, message
from tests.support.network.tunnels import over_tls

ATTEMPTS = RetryPolicy().attempts
NOWHERE = "nowhere.example"
SettingsFor = Callable[[str], UpstreamSettings]
UPSTREAMS: dict[str, SettingsFor] = {
    "hf://org/model": lambda url: UpstreamSettings(egress=LOOPBACK, hf_endpoint=url),
    "s3://bucket/": lambda url: UpstreamSettings(egress=LOOPBACK, s3_endpoint_url=url),
    "gs://bucket/": lambda url: UpstreamSettings(egress=LOOPBACK, gcs_endpoint_url=url),
    "azure://account/container": lambda url: UpstreamSettings(egress=LOOPBACK, azure_endpoint_url=url),
}
EACH_UPSTREAM = pytest.mark.parametrize(("uri", "settings"), UPSTREAMS.items(), ids=lambda value: str(value)[:2])


class Patience:
    """Asks again as the mirror does; notes the pauses instead of waiting."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.retries = UpstreamRetries(UpstreamBudgets(pause=self._pause))

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def failure(self, uri: str, settings: UpstreamSettings) -> UpstreamUnavailableError:
        """Of a listing."""
        with pytest.raises(UpstreamUnavailableError) as raised:
            async with open_source(parse_source(uri), SourceContext("acme", settings, asker=self.retries)) as source:
                await listed(source)
        return raised.value


@pytest.fixture
def patience() -> Patience:
    return Patience()


@EACH_UPSTREAM
async def test_a_listing_from_a_host_that_does_not_exist_is_requested_a_few_times_only(
    patience: Patience, monkeypatch: pytest.MonkeyPatch, uri: str, settings: SettingsFor
) -> None:
    Names(monkeypatch)
    error = await patience.failure(uri, settings(f"http://{NOWHERE}"))
    assert len(patience.pauses) == ATTEMPTS - 1
    assert NOWHERE in str(error)
    assert "does not exist" in str(error)


async def test_a_file_at_a_host_that_does_not_exist_is_requested_a_few_times_only(
    patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Places:
        async def locate(self, _: UpstreamFile) -> Location:
            return Location(f"http://{NOWHERE}/file")

    Names(monkeypatch)
    file = UpstreamFile("file", 10, Identity.of("public", "file"), "file", "v")
    wanted = FileRange(LocatedFile("s3://bucket", Places(), file), ByteRange(0, 10), lambda *_: None)
    with (
        closing(ConnectionPool(timeout_seconds=10)) as pool,
        closing(ByteThreads(1, "test")) as threads,
        pytest.raises(UpstreamUnavailableError, match=f"{NOWHERE}.*does not exist"),
    ):
        await UpstreamReader(RangedReader(pool), threads, patience.retries).read([wanted])
    assert len(patience.pauses) == ATTEMPTS - 1


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """A server whose certificate no public authority has signed."""
    play = over_tls(new_authority(tmp_path, "localhost").server, answering(message("200 OK", "Content-Length: 0")))
    with RawServer(*[play] * 20) as server:
        yield server.url.replace("http://127.0.0.1", "https://localhost")


@EACH_UPSTREAM
async def test_a_listing_from_a_server_with_an_untrusted_certificate_is_requested_once(
    patience: Patience, untrusted: str, uri: str, settings: SettingsFor
) -> None:
    error = await patience.failure(uri, settings(untrusted))
    assert patience.pauses == []
    assert not error.transient
    assert "SSL_CERT_FILE" in str(error)
