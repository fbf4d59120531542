"""The egress guard through the whole mirror: a refused upstream fails its source, for good, before anything is sent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, with_secret
from tests.support.network.egress_streets import Doorbell, Names, note_attempts

pytest_plugins = ("tests.support.mirror.fixtures",)

CONTENT = {"model.safetensors": b"weights" * 1000}


async def pause_never(_: float) -> None:
    pytest.fail("a refusal is not asked again")


@pytest.fixture
async def guarded(upstreams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MirrorUnderTest]:
    """A mirror without a word in BDN_EGRESS_ALLOW."""
    monkeypatch.delenv("BDN_EGRESS_ALLOW")
    async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
        yield mirror


@pytest.fixture
def attempts(guarded: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_attempts(monkeypatch)


async def test_an_endpoint_that_the_operator_configured_is_refused_as_well(
    guarded: MirrorUnderTest, attempts: list[str], hub: Hub, s3: S3Server, bucket: S3Bucket
) -> None:
    hub.repo("org/model").commit(CONTENT)
    bucket.put(CONTENT)
    for wanted in (source("hf://org/model"), {**source(f"s3://{bucket.name}"), **with_secret("s3-keys")}):
        document = await guarded.mirror(wanted)
        assert document["status"] == "FAILED"
        error = document["sources"][0]["error"]
        assert error["code"] == "EGRESS_REFUSED"
        assert error["details"]["host"] == "127.0.0.1"
        assert "BDN_EGRESS_ALLOW" in error["message"]
    assert not attempts
    assert (hub.log.count(), s3.log.count()) == (0, 0)


@pytest.mark.parametrize("endpoint", ["http://2130706433:{}", "http://0177.0.0.1:{}", "http://[::ffff:127.0.0.1]:{}"])
async def test_no_spelling_of_an_endpoint_helps(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.delenv("BDN_EGRESS_ALLOW")
    monkeypatch.setenv("HF_ENDPOINT", endpoint.format(hub.url.rpartition(":")[2]))
    async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
        assert (await mirror.failed(source("hf://org/model")))["code"] == "EGRESS_REFUSED"
    assert hub.log.count() == 0


async def test_bytes_are_not_read_from_a_refused_address_that_a_listed_host_names(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator allows the hub by its name; the link to its CDN is an address that nobody allowed."""
    hub.repo("org/model").commit(CONTENT)
    names = Names(monkeypatch)
    names.say("hub.example", ["127.0.0.1"])
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("127.0.0.1", "hub.example"))
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "hub.example")
    async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
        error = await mirror.failed(source("hf://org/model"))
    assert (error["code"], error["details"]["host"]) == ("EGRESS_REFUSED", "127.0.0.1")
    assert hub.log.count("tree", origin="hub") == 1
    assert hub.log.count(origin="cdn") == 0


async def test_a_hub_that_is_another_address_when_it_is_asked_again_is_not_followed(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding, over the requests of one mirror: the listing's connection goes on, a new one is refused."""
    hub.repo("org/model").commit(CONTENT)
    close_session()
    names = Names(monkeypatch)
    port = int(hub.url.rpartition(":")[2])
    names.say("hub.example", ["127.0.0.1"], ["127.0.0.2"])
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.example:{port}")
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "127.0.0.1")
    with Doorbell("127.0.0.2", port) as forbidden:
        async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
            error = await mirror.failed(source("hf://org/model"))
        assert not forbidden.rang
    assert (error["code"], error["details"]["host"]) == ("EGRESS_REFUSED", "hub.example")


async def test_what_is_allowed_is_mirrored(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/model").commit(CONTENT)
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "10.0.0.0/8\n127.0.0.0/8")
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        ready = await mirror.ready(source("hf://org/model"))
        assert await mirror.tree(ready["sources"][0]["manifest"]) == CONTENT
