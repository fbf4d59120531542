"""A mirror on a bucket whose server fails, refuses, and has other bytes than were put there: what operations.md says comes of it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.mirror.db.secrets import new_key
from bdn.store import bucket
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.contract.opening import keys_of
from tests.doubles import faults
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.support.content.calendar import Calendar
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import LONGEST_SECONDS, mirror_under_test, refusal, source, with_secret
from tests.support.network.egress import ALLOW_LOOPBACK

pytest_plugins = ("tests.support.mirror.fixtures",)

LARGE = noise(9 * MIB + 1, 2)
FIRST, LAST = digest_of(LARGE[:CHUNK_SIZE]), digest_of(LARGE[CHUNK_SIZE:])
TREE = {"a.bin": LARGE, "config.json": b"{}"}
MODEL = source("hf://org/model")
MINUTES = 600.0


@pytest.fixture
def server(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Where the store is, and what is mirrored into it."""
    hub.repo("org/model").commit(TREE)
    with ObjectServer() as server:
        server.bucket("weights")
        settings = {"STORE": "s3://weights/bdn", "STORE_ENDPOINT": server.url, "STORE_SECRET": "store"}
        settings |= {"INFRASTRUCTURE_SECRET_STORE": keys_of(server.account), "EGRESS_ALLOW": ALLOW_LOOPBACK}
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
        assert mirror.damaged() == 0


INSIDE = (
    *("s3://weights", "s3://weights/", "s3://weights/bdn", "s3://weights/bdn/", "s3://weights/bdn/b3"),
    *(
        "s3://weights/./bdn//b3",
        "s3://WEIGHTS/bdn",
        "gs://weights/bdn/b3",
        "r2://4cc0.weights/bdn",
        "r2://4cc0.eu.weights/bdn",
    ),
)


async def test_a_tenant_s_source__inside_the_store_is_refused_and_the_store_s_secret_has_no_name(
    server: ObjectServer, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("BDN_SECRET_OPERATORS", keys_of(server.account))
    monkeypatch.setenv("BDN_AZURE_ENDPOINT_URL", "http://10.0.0.1/{account}")
    server.buckets["weights"].overwrite("bdn2/x", b"beside the store")
    settings: dict[str, Any] = {"auth": "token", "token": "t", "secrets_key": new_key()}
    async with mirror_under_test(tmp_path / "mirror", bearer="t", **settings) as mirror:
        await mirror.ready(MODEL)
        mirror.http.headers["BDN-Organisation"] = "rival"
        own = await mirror.http.put("/secrets/own", json={"value": keys_of(server.account)})
        guessed = await mirror.http.put("/secrets/store", json={"value": "guessed"})
        assert (own.json()["outranked"], guessed.json()["outranked"]) == (False, False), "it confirms no name"
        await mirror.http.delete("/secrets/store")

        for uri in INSIDE:
            for auth in (with_secret("store"), with_secret("own"), {}):
                for dry_run in (False, True):
                    answer = await mirror.post(source(uri, **auth), dry_run=dry_run)
                    assert refusal(answer) == (422, "INVALID_SOURCE"), (uri, auth, answer.text)
        answer = await mirror.post(source("azure://account/weights/bdn"), dry_run=True)
        assert refusal(answer) == (422, "EGRESS_REFUSED"), "no store is at Azure"
        hub.bucket("org/weights").put({"bdn/a": b"x"})
        answer = await mirror.post(source("hf://buckets/org/weights/bdn"), dry_run=True)
        assert answer.status_code == 200, "nor is one at a hub"
        beside = "s3://weights/bdn2"
        for name in ("store", "infrastructure", "infrastructure_store", "operators"):
            assert (await mirror.failed(source(beside, **with_secret(name))))["code"] == "SECRET_NOT_FOUND"
        mine = await mirror.ready(source(beside, **with_secret("own")))
        assert await mirror.tree(mine["sources"][0]["manifest"]) == {"x": b"beside the store"}


async def test_a_mirror_waits_for_a_bucket_that_is_away_for_ten_minutes_and_everybody_else_is_answered(
    server: ObjectServer, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it is away is counted in what the mirror would have waited. Each of a hundred attempts sends a chunk."""
    files = {"a.bin": noise(MIB + 1, 1), "config.json": b"{}"}
    hub.repo("org/small").commit(files)
    monkeypatch.setattr(bucket, "Outage", lambda _: Outage(RetryPolicy(outage_seconds=0, attempts=1)))
    waited, answers = 0.0, list[tuple[int, str]]()

    async def pause(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        if waited > 60 * len(answers):
            found, ready = await mirror.http.get(f"/mirror/{begun}"), await mirror.http.get("/readyz")
            answers.append((ready.status_code, found.json()["status"]))
        if waited > MINUTES:
            server.script.clear()

    server.script.add(faults.answer(503), "/b3/", times=None, skip=1)  # a chunk is written before
    server.script.add(
        faults.drop(), "list-type", times=None, skip=2
    )  # the server is tried, and nobody collects that chunk
    async with mirror_under_test(tmp_path / "mirror", pause=pause, outage_seconds=2 * MINUTES) as mirror:
        begun = (await mirror.begin(source("hf://org/small")))["id"]
        while (document := await mirror.get(f"/mirror/{begun}", wait=LONGEST_SECONDS))["status"] == "SYNCING":
            pass
        assert (document["status"], document["bytes_transferred"]) == ("READY", sum(map(len, files.values())))
        assert await mirror.tree(document["sources"][0]["manifest"]) == files
        assert waited > MINUTES
        assert set(answers) == {(503, "SYNCING")}


async def test_a_database_that_is_restored_from_before_serves_nothing_in_part_and_says_what_is_lost(
    server: ObjectServer, hub: Hub, tmp_path: Path
) -> None:
    """As docs/operations.md has it. Of what was collected since, the upstream of one is there, and that of the other is gone."""
    trees = {name: {f"{name}.bin": name.encode() * 300_000} for name in ("kept", "back", "gone", "new")}
    for name, files in trees.items():
        hub.repo(f"org/{name}").commit(files)
    sources = {name: source(f"hf://org/{name}", f"/{name}") for name in trees}
    data_dir, backup, calendar = tmp_path / "mirror", tmp_path / "backup.sqlite", Calendar()
    server.clock = server.signatures_clock = calendar
    opened = partial(mirror_under_test, data_dir, clock=calendar, collect_seconds=0, scrub_seconds=0)
    async with opened() as mirror:
        manifests = {name: await mirror.manifest(sources[name]) for name in ("kept", "back", "gone")}
    copyfile(data_dir / "mirror.sqlite", backup)
    calendar.days += 1 / 24
    async with opened() as mirror:
        for name in ("back", "gone"):
            await mirror.evict(source=f"hf://org/{name}", tier="mirror", purge=True)
        manifests["new"] = await mirror.manifest(sources["new"])
    for left in data_dir.glob("mirror.sqlite*"):
        left.unlink()
    copyfile(backup, data_dir / "mirror.sqlite")
    hub.fail(faults.answer(404), "org/gone", times=None)
    async with opened() as mirror:
        assert await mirror.tree(manifests["kept"]) == trees["kept"]
        assert (await mirror.http.get(f"/manifests/{manifests['new']}")).status_code == 404
        chunks = {name: str(digest_of(trees[name][f"{name}.bin"])) for name in ("back", "gone")}
        for chunk in chunks.values():
            assert refusal(await mirror.http.get(f"/chunks/{chunk}")) == (404, "NOT_FOUND")

        # Of what came since the backup the database has no rows. A collection leaves it alone unless it is asked for orphans: a
        # slab, a root and its page, a listing and its page.
        for asked, count in (({}, 0), ({"orphans": True}, 5)):
            planned = (await mirror.collect(dry_run=True, grace_seconds=0, **asked))["kinds"]
            assert [kind["count"] for kind in planned if kind["kind"] == "chunks"] == [count]

        # A verification names what was collected since, brings what can be had, and says what cannot.
        verified = await mirror.verify(tier="mirror")
        outcomes = {name: dict[str, str]() for name in ("back", "gone")}
        for item in verified["items"]:
            outcomes[item["sources"][0].removeprefix("hf://org/")][item["chunk"]] = item["outcome"]
        assert verified["status"] == "DAMAGED"
        for name, outcome in (("back", "repaired"), ("gone", "lost")):
            assert set(outcomes[name].values()) == {outcome}
            assert {chunks[name], manifests[name]} < outcomes[name].keys(), "and the page"
        assert refusal(await mirror.http.get(f"/chunks/{chunks['gone']}")) == (503, "STORE_UNAVAILABLE")
        assert await mirror.tree(manifests["back"]) == trees["back"]

        # Its caller asks for it again, and has it; then a collection takes nothing of it.
        assert await mirror.manifest(sources["new"]) == manifests["new"]
        calendar.days += 2
        await mirror.collect()
        for name in ("kept", "back", "new"):
            assert await mirror.tree(manifests[name]) == trees[name]
