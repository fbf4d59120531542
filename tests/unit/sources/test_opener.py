"""Opening a source: which SDK is loaded, which address a bucket has, and by which proxy it is asked."""

import asyncio
import json
import subprocess
import sys

import pytest

from bdn.core.errors import UpstreamUnavailableError
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import BucketUri, parse_source
from bdn.sources.guarded_connector import proxy_for
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext
from tests.doubles.gcs_accounts import GoogleAccount


def test_the_sdk_of_a_scheme_is_loaded_when_a_source_of_it_is_opened_and_no_other() -> None:
    script = """
import asyncio, sys
import bdn.cli.serve
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import SourceContext
def loaded():
    print(*sorted({"huggingface_hub", "aiobotocore", "gcsfs"} & set(sys.modules)))
async def show():
    for uri in ("r2://account.bucket/p", "s3://bucket/p", "hf://o/r", "gs://bucket/p"):
        async with open_source(parse_source(uri), SourceContext("acme", UpstreamSettings())):
            loaded()
loaded()
asyncio.run(show())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    aws, both = "aiobotocore", "aiobotocore huggingface_hub"
    assert done.stdout.splitlines() == ["", aws, aws, both, "aiobotocore gcsfs huggingface_hub"]


@pytest.mark.parametrize(("bucket", "endpoint", "start"), [
    ("plain", None, "https://plain.s3.eu-west-1.amazonaws.com/"),
    ("dot.ted", None, "https://s3.eu-west-1.amazonaws.com/dot.ted/"),
    ("plain", "https://minio.example:9000", "https://minio.example:9000/plain/"),
])  # fmt: skip
async def test_only_aws_is_addressed_by_virtual_host_and_only_where_the_name_has_no_dots(
    bucket: str, endpoint: str | None, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://192.0.2.1")  # counts only through the settings
    keys = Secret("keys", '{"aws_access_key_id": "A", "aws_secret_access_key": "S", "aws_region": "eu-west-1"}')
    file = UpstreamFile("a", 1, Identity.of("organisation:acme", "s3"), "a b/ü", '"etag"')
    context = SourceContext("acme", UpstreamSettings(s3_endpoint_url=endpoint), keys)
    async with open_source(parse_source(f"s3://{bucket}"), context) as source:
        location = await source.locate(file)
    assert location.url.startswith(f"{start}a%20b/%C3%BC?")
    assert "%2Feu-west-1%2Fs3%2F" in location.url


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
