import subprocess
import sys

import pytest

from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.source.uri import parse_source
from bdn.sources.opener import open_source
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import Secret, SourceContext


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
