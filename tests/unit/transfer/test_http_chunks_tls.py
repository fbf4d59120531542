"""Chunks over TLS: the same bytes, gone on with where they broke off, and from nobody but whom the operator trusts."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bdn.core.errors import StoreUnavailableError
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from tests.support.content.readers import read_chunk
from tests.support.network.authority import Authority, new_authority
from tests.support.network.raw_server import RawServer
from tests.support.network.tunnels import over_tls

CONTENT = bytes(range(251)) * 20_000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("authority"), "localhost")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    for name in ("HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificates))


@pytest.fixture
def pool() -> Iterator[ConnectionPool]:
    with closing(ConnectionPool(timeout_seconds=10)) as made:
        yield made


def reader_of(pool: ConnectionPool, server: RawServer, host: str = "localhost") -> HttpChunkReader:
    return HttpChunkReader(pool, f"https://{host}:{urlsplit(server.url).port}", "grant")


@pytest.mark.parametrize(("host", "trusted"), [("localhost", "another"), ("127.0.0.1", "this")])
def test_a_server_that_is_not_to_be_trusted_is_told_nothing(
    pool: ConnectionPool, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, trusted: str
) -> None:
    if trusted == "another":
        monkeypatch.setenv("SSL_CERT_FILE", str(new_authority(tmp_path, "localhost").certificates))
    heard: list[bytes] = []
    with (
        RawServer(over_tls(authority.server, lambda connection: heard.append(connection.recv(1)))) as server,
        pytest.raises(StoreUnavailableError, match="CERTIFICATE_VERIFY_FAILED") as raised,
    ):
        read_chunk(reader_of(pool, server, host), CONTENT)
    assert raised.value.code == "STORE_UNAVAILABLE"
    assert not any(heard)
