"""A mirror on a bucket whose server fails, refuses, and has other bytes than were put there: what operations.md says comes of it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.contract.opening import keys_of
from tests.doubles import faults
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.support.agent.rig import Clock
from tests.support.mirror.service import LONGEST_SECONDS, mirror_under_test, refusal, source, until
from tests.support.network.egress import ALLOW_LOOPBACK

pytest_plugins = ("tests.support.mirror.fixtures",)

LARGE = GeneratedContent(CHUNK_SIZE + 1000, seed=3).read(0, CHUNK_SIZE + 1000)
FIRST, LAST = digest_of(LARGE[:CHUNK_SIZE]), digest_of(LARGE[CHUNK_SIZE:])
TREE = {"a.bin": LARGE, "config.json": b"{}"}
MODEL = source("hf://org/model")


@pytest.fixture
def server(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Where the store is, and what is mirrored into it."""
    hub.repo("org/model").commit(TREE)
    with ObjectServer() as server:
        server.bucket("weights")
        settings = {"STORE": "s3://weights/bdn", "STORE_ENDPOINT": server.url, "STORE_SECRET": "store"}
        settings |= {"SECRET_STORE": keys_of(server.account), "EGRESS_ALLOW": ALLOW_LOOPBACK}
        for name, value in settings.items():
            monkeypatch.setenv(f"BDN_{name}", value)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield server


async def test_what_the_server_of_a_bucket_does_is_outlived_repaired_or_told_with_the_setting(
    server: ObjectServer, tmp_path: Path
) -> None:
    objects = server.buckets["weights"]
    async with mirror_under_test(tmp_path / "mirror") as mirror:
        # It is too busy, and then answers in part.
        server.script.add(faults.answer(503), "/b3/", method="PUT", times=2)
        manifest = await mirror.manifest(MODEL)
        server.script.add(faults.truncate(1000), FIRST.hex, method="GET")
        assert await mirror.tree(manifest) == TREE
        assert not (mirror.data_dir / "store").exists()

        # It has wrong bytes, and loses some.
        objects.overwrite(f"bdn/b3/{FIRST.fanout}", b"wrong")
        del objects.held[f"bdn/b3/{LAST.fanout}"]
        assert (await mirror.http.get(f"/chunks/{FIRST}")).content == b"wrong", "who reads it compares it"
        for chunk in (FIRST, LAST):
            answer = await mirror.http.get(f"/chunks/{chunk}", headers={SUSPECT_HEADER: "1"})
            assert refusal(answer) == (503, "STORE_UNAVAILABLE")
        assert (await mirror.verify())["status"] == "DONE"
        assert await mirror.tree(manifest) == TREE
        assert await mirror.metric("bdn_mirror_evidence_chunks") == 1

        # It refuses us: nothing is taken for absent, and the setting is named.
        server.fail(faults.answer(403, body=b"<Error><Code>AccessDenied</Code></Error>"), times=None)
        for path in (f"/chunks/{FIRST}", "/readyz"):
            answer = await mirror.http.get(path)
            assert refusal(answer) == (503, "STORE_UNAVAILABLE")
            assert "BDN_STORE_SECRET" in answer.text
            assert "X-Amz" not in answer.text
        assert await mirror.metric("bdn_mirror_evidence_chunks") == 1, "as it was when it was last seen"
        server.script.clear()
        assert await mirror.tree(manifest) == TREE
        assert (await mirror.get("/manifests"))["store"]["disk_free"] is None
        assert mirror.count("damaged_chunks") == 0


async def test_what_the_scrub_cannot_read_in_time_it_looks_at_and_finds_what_is_absent_or_of_another_size(
    server: ObjectServer, tmp_path: Path
) -> None:
    objects, clock = server.buckets["weights"], Clock()
    server.clock = clock
    # A round may read a thousand bytes, so it reads one object in some thousand.
    settings: dict[str, Any] = {"scrub_seconds": 1e-6, "scrub_rate": 10**9, "collect_seconds": 0}
    async with mirror_under_test(tmp_path / "mirror", clock=clock, **settings) as mirror:

        async def a_round() -> int:
            """How many chunks it has read."""
            server.log.clear()
            clock.now += 1
            async with asyncio.timeout(LONGEST_SECONDS):
                while await mirror.metric("bdn_mirror_scrub_round_timestamp_seconds") < clock.now:
                    pass
            return server.log.count("/b3/", method="GET")

        manifest = await mirror.manifest(MODEL)
        assert await a_round() == 0
        assert server.log.count("/b3/", method="HEAD") == 3
        objects.overwrite(f"bdn/b3/{FIRST.fanout}", LARGE[: CHUNK_SIZE - 1])
        del objects.held[f"bdn/b3/{LAST.fanout}"]
        assert await a_round() > 0
        await until(lambda: not mirror.count("damaged_chunks"))
        assert await mirror.tree(manifest) == TREE
        assert await mirror.metric("bdn_mirror_repaired_chunks_total") == 2
        objects.overwrite(f"bdn/b3/{FIRST.fanout}", bytes(CHUNK_SIZE))
        assert await a_round() == 0, "that its bytes are others only reading tells"
