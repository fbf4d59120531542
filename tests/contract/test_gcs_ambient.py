"""What of the machine's own Google credentials counts: one variable, for sources without a secret, where that is allowed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.core.errors import AuthRequiredError, SecretMalformedError
from tests.contract.source_contract import listed
from tests.doubles.gcs import GcsServer
from tests.support.mirror.gcs_sources import Way


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        server.bucket("private").put({"a.txt": b"x"})
        yield server


async def test_the_operator_s_own_key_counts_only_where_it_is_allowed(server: GcsServer, tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(server.account.key(server.token_url)))
    way = Way(server.url, server.token_url, key_file=str(file), ambient=True)
    async with way.open("gs://private") as source:
        assert set(await listed(source)) == {"a.txt"}
    async with replace(way, ambient=False).open("gs://private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)
    async with replace(way, key=server.stranger.key(server.token_url)).open("gs://private") as source:
        with pytest.raises(AuthRequiredError, match="403"):
            await listed(source)


async def test_a_key_file_that_cannot_be_read_is_named_by_its_variable(server: GcsServer, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        way = Way(server.url, key_file=str(tmp_path / name), ambient=True)
        with pytest.raises(SecretMalformedError, match="'GOOGLE_APPLICATION_CREDENTIALS' names a file"):
            async with way.open("gs://private"):
                pass


async def test_the_machine_s_own_google_login_is_left_alone(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(server.account.key(server.token_url)))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://192.0.2.1")
    monkeypatch.setenv("GOOGLE_API_USE_CLIENT_CERTIFICATE", "true")
    monkeypatch.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "evil.example")
    async with Way(server.url).open("gs://private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)


async def test_the_operator_s_netrc_is_sent_nowhere(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login operator password sesame\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with Way(server.url, server.token_url, server.account.key(server.token_url)).open("gs://private") as source:
        assert set(await listed(source)) == {"a.txt"}
    async with Way(server.url).open("gs://private") as source:
        with pytest.raises(AuthRequiredError, match="anonymous"):
            await listed(source)
    sent = [request.headers.get("authorization", "") for request in server.log.find()]
    assert len(sent) == 3
    assert not any(header.startswith("Basic") for header in sent)
