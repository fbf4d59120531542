"""Fixtures of the mirror's tests; named by ``pytest_plugins`` in the modules that use them."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.backends import Embedded, behind
from tests.support.mirror.pgbouncer import pgbouncer
from tests.support.mirror.postgres import drop_database, new_database
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, prepare_database
from tests.support.network.egress import ALLOW_LOOPBACK

_NUMBERS = count()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub of the test's own: one that was told to stop stalling cannot stall again."""
    with Hub() as hub:
        yield hub
    close_session()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server) -> S3Server:
    s3_server.log.clear()
    s3_server.script.clear()
    return s3_server


@pytest.fixture
def bucket(s3: S3Server) -> S3Bucket:
    return s3.bucket(f"mirrored-{next(_NUMBERS)}")


@pytest.fixture
def upstreams(hub: Hub, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mirror that is opened now finds its upstreams, with the bucket's keys as the secret ``s3-keys``."""
    monkeypatch.setenv("BDN_EGRESS_ALLOW", ALLOW_LOOPBACK)
    monkeypatch.setenv("BDN_SECRETS_ORGANISATIONS", "acme, rival, third, red, blue, a, b")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url)
    monkeypatch.setenv("BDN_R2_ENDPOINT_URL", s3.url)
    keys = (
        f'"aws_access_key_id": "{s3.account.access_key_id}", "aws_secret_access_key": "{s3.account.secret_access_key}"'
    )
    monkeypatch.setenv("BDN_SECRET_S3_KEYS", f"{{{keys}}}")
    monkeypatch.setenv("BDN_SECRET_HUB_TOKEN", hub.token)


@pytest.fixture
async def mirror(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        yield mirror


@pytest.fixture
async def mirror_with_data_plane(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with mirror_under_test(tmp_path / "mirror", serve=True) as mirror:
        yield mirror


@pytest.fixture
async def idle(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """A mirror without a worker: requests stay as they came."""
    async with mirror_under_test(tmp_path / "mirror", work=False) as mirror:
        yield mirror


@pytest.fixture
async def postgres_url(postgres_server: str, postgres_template: str) -> AsyncIterator[str]:
    """A database at the newest migration."""
    url = await new_database(postgres_server, postgres_template)
    yield url
    await drop_database(postgres_server, url)


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: str) -> Iterator[str]:
    with pgbouncer(postgres_server) as url:
        yield url


@pytest.fixture
async def empty_postgres_url(postgres_server: str) -> AsyncIterator[str]:
    url = await new_database(postgres_server)
    yield url
    await drop_database(postgres_server, url)


@pytest.fixture(params=["sqlite", "postgres"])
def database_options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What a mirror is told of its database, once for each kind of them: nothing, or where it is."""
    if request.param == "sqlite":
        if not isinstance(behind(tmp_path), Embedded):
            pytest.skip("on production: PostgreSQL is its database already")
        return {}
    return {"database_url": request.getfixturevalue("postgres_url")}


@pytest.fixture
def database_url(database_options: dict[str, Any], tmp_path: Path) -> str:
    """The database of a mirror with ``database_options`` whose data directory is ``mirror``."""
    if not database_options:
        prepare_database(tmp_path / "mirror")
    return str(database_options.get("database_url", f"sqlite+aiosqlite:///{tmp_path}/mirror/mirror.sqlite"))
