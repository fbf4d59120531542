"""R2 through the whole mirror, at the address that the operator's setting names."""

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.content import GeneratedContent
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)

NUMBERS = count()
LARGE = GeneratedContent(CHUNK_SIZE + 5).read(0, CHUNK_SIZE + 5)


@pytest.fixture
def r2_bucket(s3: S3Server) -> S3Bucket:
    return s3.bucket(f"r2-mirrored-{next(NUMBERS)}", region="auto")


@pytest.fixture
async def r2_mirror(
    upstreams: None, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MirrorUnderTest]:
    monkeypatch.setenv("BDN_R2_ENDPOINT_URL", s3.url)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.account.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.account.secret_access_key)
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        yield mirror


async def test_a_folder_of_r2_is_mirrored_once(r2_mirror: MirrorUnderTest, s3: S3Server, r2_bucket: S3Bucket) -> None:
    files = {"large.bin": LARGE, "sub/a b+c%.json": b"{}", "empty": b""}
    r2_bucket.put({f"m/{path}": content for path, content in files.items()})
    wanted = source(f"r2://4cc0.eu.{r2_bucket.name}/m", **with_secret("s3-keys"))
    done = await r2_mirror.ready(wanted)
    assert await r2_mirror.tree(done["sources"][0]["manifest"]) == files
    s3.log.clear()
    again = await r2_mirror.ready(wanted)
    assert again["sources"][0]["manifest"] == done["sources"][0]["manifest"]
    assert s3.log.count() == s3.log.count("list-type=2") == 2
