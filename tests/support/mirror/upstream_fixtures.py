"""Fixtures of the tests that play failures of upstreams; named by ``pytest_plugins`` in the modules that use them."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.doubles.gcs import GcsServer
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Server
from tests.support.mirror.scripted_upstreams import (
    LARGE,
    STALL,
    TRANSFERS,
    Pauses,
    ScriptedUpstream,
    scripted_bucket,
    scripted_hub,
    scripted_hub_bucket,
)
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test
from tests.support.network.fault_proxy import FaultProxy


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture(params=["hf", "s3", "gs"])
def upstream(request: pytest.FixtureRequest, upstreams: None, monkeypatch: pytest.MonkeyPatch) -> ScriptedUpstream:
    scheme = request.param
    if scheme == "hf":
        return scripted_hub(request.getfixturevalue("hub"))
    if scheme.endswith("bucket"):
        return scripted_hub_bucket(request.getfixturevalue("hub"), sends_bytes=scheme == "mirrored bucket")
    if scheme == "gs":
        server: GcsServer = request.getfixturevalue("gcs")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("BDN_GOOGLE_TOKEN_URL", server.token_url)
        monkeypatch.setenv("BDN_SECRET_GS_KEY", json.dumps(server.account.short_key()))
        return scripted_bucket(server, scheme)
    s3: S3Server = request.getfixturevalue("s3")
    if scheme == "r2":
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
        monkeypatch.setenv("BDN_R2_ENDPOINT_URL", s3.url)
    return scripted_bucket(s3, scheme)


@pytest.fixture
def proxy(
    request: pytest.FixtureRequest, upstream: ScriptedUpstream, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultProxy]:
    """In front of the bucket's server, or of the CDN to which the hub sends who wants bytes. It plays on the large file's."""
    monkeypatch.setattr("bdn.mirror.app._UPSTREAM_TIMEOUT_SECONDS", 1.0)
    scheme = request.node.callspec.params["upstream"]
    server, name = {
        "hf": ("hub", ""),
        "s3": ("s3", "AWS_ENDPOINT_URL_S3"),
        "r2": ("s3", "BDN_R2_ENDPOINT_URL"),
        "gs": ("gcs", "STORAGE_EMULATOR_HOST"),
    }[scheme]
    url = hub.cdn_url if scheme == "hf" else request.getfixturevalue(server).url
    there = urlsplit(url)
    proxy = FaultProxy((there.hostname or "", there.port or 0), chosen=_is_content)
    with proxy.running():
        if name:
            monkeypatch.setenv(name, proxy.url)
        else:
            monkeypatch.setattr(hub._cdn, "url", proxy.url)
        yield proxy


def _is_content(asked: str) -> bool:
    return asked.startswith("GET ") and LARGE in asked and ("/o/" not in asked or "alt=media" in asked)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk whose predecessor failed is not held for seconds."""
    monkeypatch.setattr("bdn.mirror.ingest.copier.TURN_SECONDS", 0.2)


@pytest.fixture
async def patient_hub(
    upstreams: None, no_turns: None, pauses: Pauses, tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that waits for nothing but answers, however long they take: each request that fails is one that a test has failed."""
    async with mirror_under_test(tmp_path / "mirror", pause=pauses, transfers=TRANSFERS) as mirror:
        yield mirror


@pytest.fixture
def patient(upstream: ScriptedUpstream, patient_hub: MirrorUnderTest) -> MirrorUnderTest:
    """The same, opened once ``upstream`` is there."""
    return patient_hub


@pytest.fixture
async def hasty(
    upstream: ScriptedUpstream, no_turns: None, pauses: Pauses, tmp_path: Path
) -> AsyncIterator[MirrorUnderTest]:
    """A mirror that waits for nothing and gives up on silence soon, opened once ``upstream`` is there."""
    async with mirror_under_test(tmp_path / "mirror", pause=pauses, stall=STALL, transfers=TRANSFERS) as mirror:
        yield mirror
