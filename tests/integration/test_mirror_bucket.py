"""A mirror on a bucket whose server fails, refuses, and has other bytes than were put there: what operations.md says comes of it."""

from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.contract.opening import keys_of
from tests.doubles import faults
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.support.mirror.service import mirror_under_test, refusal, source
from tests.support.network.egress import ALLOW_LOOPBACK

pytest_plugins = ("tests.support.mirror.fixtures",)

LARGE = GeneratedContent(CHUNK_SIZE + 1000, seed=3).read(0, CHUNK_SIZE + 1000)
FIRST, LAST = digest_of(LARGE[:CHUNK_SIZE]), digest_of(LARGE[CHUNK_SIZE:])
TREE = {"a.bin": LARGE, "config.json": b"{}"}
MODEL = source("hf://org/model")


async def test_what_the_server_of_a_bucket_does_is_outlived_repaired_or_told_with_the_setting(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/model").commit(TREE)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("BDN_EGRESS_ALLOW", ALLOW_LOOPBACK)
    with ObjectServer() as server:
        objects = server.bucket("weights")
        for name, value in {"STORE": "s3://weights/bdn", "STORE_ENDPOINT": server.url, "STORE_SECRET": "store"}.items():
            monkeypatch.setenv(f"BDN_{name}", value)
        monkeypatch.setenv("BDN_SECRET_STORE", keys_of(server.account))
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
