"""Fixtures of clouds that trust a mirror; named by ``pytest_plugins`` after those of the mirror."""

from collections.abc import Iterator

import pytest

from tests.doubles.s3 import S3Server
from tests.support.content.cloud_identity import Clouds, clouds_of


@pytest.fixture
def clouds(upstreams: None, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    with clouds_of(s3) as clouds:
        own = clouds.sts.principals["AKIAOPERATOR"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", own.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own.secret_access_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", clouds.sts.url)
        monkeypatch.setenv("BDN_GOOGLE_STS_URL", clouds.google.sts_url)
        monkeypatch.setenv("BDN_GOOGLE_IAM_URL", clouds.google.iam_url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", clouds.gcs.url)
        yield clouds
