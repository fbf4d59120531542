import asyncio
import json

import pytest

from bdn.core.errors import UpstreamUnavailableError
from bdn.core.source.uri import BucketUri
from bdn.sources.guarded_connector import proxy_for
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.doubles.gcs_accounts import GoogleAccount


@pytest.mark.parametrize(("url", "proxy"), [
    ("https://storage.example/b", "http://proxy.example:3128"),
    ("https://sub.internal.example/b", None),
    ("http://storage.example/b", None),
])  # fmt: skip
def test_https_addresses_go_by_the_proxy_unless_they_are_excepted(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str | None
) -> None:
    monkeypatch.setenv("NO_PROXY", "internal.example")
    for written in ("http://proxy.example:3128", "proxy.example:3128"):
        monkeypatch.setenv("HTTPS_PROXY", written)
        assert proxy_for(url) == proxy
    monkeypatch.setenv("HTTPS_PROXY", "")
    assert not proxy_for(url)


@pytest.mark.parametrize("signed_in", [False, True])
async def test_gcs_and_its_tokens_are_asked_by_way_of_the_proxy_with_its_own_password(
    monkeypatch: pytest.MonkeyPatch, signed_in: bool
) -> None:
    heard: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:pass@127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", "")
        key = GoogleAccount("proxied").key("https://token.example/token")
        settings = UpstreamSettings(gcs_endpoint_url="https://storage.example")
        context = SourceContext("acme", settings, Secret("key", json.dumps(key)) if signed_in else None)
        async with open_source(BucketUri("gs", "bucket", ""), context) as source:
            with pytest.raises(UpstreamUnavailableError) as raised:
                await anext(source.list(await source.resolve()))
    host = b"token.example" if signed_in else b"storage.example"
    assert [request.split(b"\r\n")[0] for request in heard] == [b"CONNECT %s:443 HTTP/1.1" % host]
    assert b"Proxy-Authorization: Basic dXNlcjpwYXNz" in heard[0]
    assert "pass" not in str(raised.value)
