"""Fixtures of clouds that trust a mirror; named by ``pytest_plugins`` after those of the mirror."""

import time
from collections.abc import Iterator

import pytest

from tests.doubles.gcs import GcsServer
from tests.doubles.google_sts import GoogleTokenServer, Provider, ServiceAccount
from tests.doubles.openid import OpenIdReader
from tests.doubles.s3 import S3Server
from tests.doubles.sigv4 import Account
from tests.doubles.sts import AccountTrust, StsServer, WebTrust
from tests.fakes.clock import Clock
from tests.support.content.cloud_identity import ASSUMED_ROLE, ISSUER, POOL, PROVIDER, ROLE, SUBJECTS, Clouds


@pytest.fixture
def clouds(upstreams: None, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clouds]:
    clock = Clock(time.time())
    reader = OpenIdReader(clock)
    with GcsServer(clock=clock) as gcs, StsServer(reader, s3.accounts, clock) as sts:
        clock.then.append(sts.end_sessions)
        own = Account("AKIAOPERATOR", "operator/secret+key-3")
        sts.principals[own.access_key_id] = own
        sts.roles[ROLE] = WebTrust(ISSUER, SUBJECTS)
        sts.roles[ASSUMED_ROLE] = AccountTrust(own.access_key_id, "bdn:default")
        with GoogleTokenServer(reader, gcs.tokens, clock) as google:
            google.providers[PROVIDER] = Provider(ISSUER, SUBJECTS)
            google.accounts[gcs.account.email] = ServiceAccount({POOL: SUBJECTS})
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", own.access_key_id)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own.secret_access_key)
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
            monkeypatch.setenv("BDN_GOOGLE_STS_URL", google.sts_url)
            monkeypatch.setenv("BDN_GOOGLE_IAM_URL", google.url)
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
            yield Clouds(clock, reader, sts, google, s3, gcs)
