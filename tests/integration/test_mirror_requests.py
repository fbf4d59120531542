"""A source goes in at ``POST /mirror`` and comes out as a manifest, a layout and chunks; or fails for good, and harms no other."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.store import StoreDisk
from bdn.core.units import format_size
from bdn.wire.grants import LONGEST_GRANT, GrantVerifier
from tests.doubles.faults import flip_byte, stall
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.content.calendar import Calendar
from tests.support.content.noise import MIB, noise
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, source, until, with_secret
from tests.support.network.egress_streets import Names

pytest_plugins = ("tests.support.mirror.fixtures",)
LARGE = noise(9 * MIB + 1, 2)
AWKWARD = {
    "a b/c d.txt": b"spaces",
    "ünïcödé/日本語.json": b"unicode",
    "a+b.txt": b"plus",
    "100%.txt": b"percent",
    "x%20y.txt": b"looks encoded",
    "empty.txt": b"",
    "nested/empty.bin": b"",
    ".hidden/.file": b"dot",
}
TREE: dict[str, bytes] = {**AWKWARD, "config.json": b"{}", "sub/model.safetensors": LARGE}


def hub_model(hub: Hub, name: str = "org/model", files: dict[str, Any] | None = None, **kind: Any) -> Json:
    hub.repo(name, **kind).commit(files or TREE)
    return source(f"hf://{name}")


def s3_folder(bucket: S3Bucket, prefix: str = "llama", files: dict[str, bytes] | None = None) -> Json:
    bucket.put({f"{prefix}/{path}": content for path, content in (files or TREE).items()})
    return source(f"s3://{bucket.name}/{prefix}", **with_secret("s3-keys"))


def hub_folder(hub: Hub, files: dict[str, bytes] | None = None) -> Json:
    bucket = hub.buckets.get("org/bucket") or hub.bucket("org/bucket", private=True)
    bucket.put({f"llama/{path}": content for path, content in (files or TREE).items()})
    return source("hf://buckets/org/bucket/llama", **with_secret("hub-token"))


@pytest.mark.parametrize("upstream", ["hf", "hub bucket", "s3", "r2"])
async def test_what_is_read_back_from_the_mirror_is_the_upstream_s_tree(
    mirror: MirrorUnderTest, hub: Hub, s3: S3Server, bucket: S3Bucket, upstream: str
) -> None:
    made = {"hf": lambda: hub_model(hub), "hub bucket": lambda: hub_folder(hub)}
    wanted = made.get(upstream, lambda: s3_folder(bucket))()
    if upstream == "r2":
        wanted["source"] = f"r2://account.{bucket.name}/llama"
    document = await mirror.ready(wanted)
    size = sum(map(len, TREE.values()))
    assert document["files_total"] == len(TREE)
    assert document["bytes_total"] == document["bytes_transferred"] == size
    assert document["bytes_reused"] == 0
    assert await mirror.tree(document["sources"][0]["manifest"]) == TREE
    served = hub.log.find(method="GET", origin="cdn") if upstream in made else s3.log.find("llama/", method="GET")
    assert sum(request.bytes_served for request in served) >= len(LARGE)


async def test_only_a_changed_object_moves(mirror: MirrorUnderTest, s3: S3Server, bucket: S3Bucket) -> None:
    wanted = s3_folder(bucket)
    await mirror.ready(wanted)
    bucket.put({"llama/config.json": b"[]"})  # of the same size: the ETag tells
    s3.log.clear()
    assert (await mirror.ready(wanted))["bytes_transferred"] == 2
    assert s3.log.count("llama/", method="GET") == s3.log.count("llama/config.json", method="GET") == 1


async def test_only_a_changed_file_of_a_hub_s_bucket_moves(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_folder(hub)
    await mirror.ready(wanted)
    hub_folder(hub, TREE | {"config.json": b"[]"})  # all are uploaded again, and one has other bytes
    hub.log.clear()
    assert (await mirror.ready(wanted))["bytes_transferred"] == 2
    assert hub.log.count("/resolve/") == hub.log.count("config.json", origin="hub") == 1
    assert hub.log.count("xet-read-token") == 0


async def test_a_moved_mount_or_other_patterns_read_nothing_again(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_model(hub)
    first = await mirror.ready(wanted)
    moved = await mirror.ready({**wanted, "mount_location": "/elsewhere"})
    fewer = await mirror.ready({**wanted, "allow_patterns": ["**/*.txt", "*.json"]})
    assert moved["bytes_transferred"] == fewer["bytes_transferred"] == 0
    assert moved["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert fewer["sources"][0]["manifest"] != first["sources"][0]["manifest"]
    assert (await mirror.tree(fewer["sources"][0]["manifest"])).keys() == {
        path for path in TREE if path.endswith(".txt") or path == "config.json"
    }


async def test_equal_files_of_two_repositories_are_stored_once(mirror: MirrorUnderTest, hub: Hub) -> None:
    shared = {"model.safetensors": LARGE, "config.json": b"{}"}
    await mirror.ready(hub_model(hub, "org/one", {**shared, "one.txt": b"1"}))
    stored = mirror.chunks()
    document = await mirror.ready(hub_model(hub, "org/two", {**shared, "two.txt": b"2"}))
    assert document["bytes_transferred"] == len(LARGE) + 3  # an upstream's checksum does not prove equal bytes
    new = mirror.chunks().keys() - stored.keys()
    assert sum(mirror.chunks()[name] for name in new) < CHUNK_SIZE  # the other slab, and documents


async def test_the_sources_of_a_training_job_are_manifests_of_one_grant(
    mirror: MirrorUnderTest, hub: Hub, bucket: S3Bucket
) -> None:
    model, data = hub_model(hub), {**s3_folder(bucket, "data", {"a.csv": b"1,2"}), "mount_location": "/data"}
    job = {"image": {"base_image": "x", "docker_auth": None}, "compute": {"node_count": 1}, "name": None}
    begun = await mirror.http.post("/mirror", json={"training_job": {**job, "weights": [model, data]}})
    document = await mirror.ended(begun.json()["id"])
    assert (document["status"], document["grant"] is None) == ("READY", False)
    assert [part["source"] for part in document["sources"]] == [model["source"], data["source"]]
    assert document["files_total"] == len(TREE) + 1
    assert await mirror.tree(document["sources"][1]["manifest"]) == {"a.csv": b"1,2"}
    assert (await mirror.ready(model, data))["bytes_transferred"] == 0


async def test_mount__of_a_mirror_with_several__is_read_alone_with_a_grant_for_it_alone(
    mirror: MirrorUnderTest, hub: Hub
) -> None:
    model = {**hub_model(hub, "org/model", {"model.safetensors": LARGE}), "mount_location": "/app/model"}
    data = {**hub_model(hub, "org/data", {"a.csv": b"1,2"}), "mount_location": "/app/data"}
    whole = await mirror.ready(model, data)
    for asked in ("/app/data", "/app//data/"):
        document = await mirror.get(f"/mirror/{whole['id']}", mount=asked, wait=1)
        (part,) = document["sources"]
        assert part == whole["sources"][1]
        assert (document["id"], document["status"], document["files_total"], document["bytes_total"]) == (
            whole["id"], "READY", 1, 3,
        )  # fmt: skip
        verifier = GrantVerifier(mirror.service.requests.signer.public_keys)
        grants = [verifier.verify(one["grant"], now=time.time()) for one in (document, whole)]
        assert grants[0] == replace(grants[1], mounts=grants[1].mounts[1:], expires_at=grants[0].expires_at)
        assert await mirror.tree(part["manifest"], document["grant"]) == {"a.csv": b"1,2"}

    for absent, code in (("/app/model/deep", "NOT_FOUND"), ("/app", "NOT_FOUND"), ("data", "INVALID_MOUNT")):
        answer = await mirror.http.get(f"/mirror/{whole['id']}", params={"mount": absent})
        assert refusal(answer)[1] == code, absent


@pytest.mark.parametrize("weights", [None, []])
async def test_a_job_without_weights_is_ready_at_once_with_a_grant_for_nothing(
    idle: MirrorUnderTest, weights: list[Json] | None
) -> None:
    job = {"training_job": {"image": {"base_image": "x"}, "weights": weights}}
    plan = await idle.http.post("/mirror", json=job, params={"dry_run": True})
    assert (plan.status_code, plan.json()["sources"], plan.json()["bytes"]) == (200, [], 0)
    begun = await idle.http.post("/mirror", json=job)
    document = begun.json()
    assert (begun.status_code, document["status"], document["sources"]) == (202, "READY", [])
    assert (document["files_total"], document["bytes_total"], document["error"]) == (0, 0, None)
    assert document["completed_at"] is not None
    grant = GrantVerifier(idle.service.requests.signer.public_keys).verify(document["grant"], now=time.time())
    assert (grant.organisation, grant.mounts) == ("default", ())
    assert (await idle.canceled(document["id"]))["status"] == "READY"
    assert [one["id"] for one in (await idle.get("/mirror", status="READY"))["items"]] == [document["id"]]


async def test_a_source_that_stands_twice_in_a_request_is_read_once(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_model(hub, files={"model.safetensors": LARGE})
    document = await mirror.ready(wanted, {**wanted, "mount_location": "/again"})
    assert (document["bytes_transferred"], document["bytes_reused"]) == (len(LARGE), len(LARGE))
    assert document["sources"][0]["manifest"] == document["sources"][1]["manifest"]


async def test_the_same_request_joins_the_one_that_runs(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_model(hub)
    hub.fail(stall(), origin="cdn")
    first = await mirror.begin(wanted)
    await until(lambda: hub.log.count(origin="cdn"))
    again = await mirror.begin({**wanted, "auth": None, "allow_patterns": []})
    other = await mirror.begin({**wanted, "mount_location": "/other"})
    assert again["id"] == first["id"] != other["id"]
    hub.release_stalled()
    documents = [await mirror.ended(mirror_id) for mirror_id in (first["id"], other["id"])]
    assert [document["status"] for document in documents] == ["READY", "READY"]
    size = sum(map(len, TREE.values()))
    for document in documents:
        assert document["bytes_transferred"] + document["bytes_reused"] == size
    assert sum(document["bytes_transferred"] for document in documents) == size  # each byte was read once


async def test_an_unchanged_source_is_decided_by_its_listing_alone(mirror: MirrorUnderTest, hub: Hub) -> None:
    files = 3500  # four pages of a hub, with few contents, so that they are copied in no time
    repository = hub.repo("org/large")
    repository.commit({f"data/{number // 500}/{number:05}.txt": b"%d" % (number % 5) for number in range(files)})
    first = await mirror.ready(source("hf://org/large"))
    assert first["files_total"] == files
    repository.commit({})  # another commit with the same files, so that nothing is recalled
    hub.log.clear()

    plan = await mirror.plan(source("hf://org/large"))
    assert (plan["files"], plan["bytes_to_transfer"]) == (files, 0)
    assert hub.log.count() == 1 + 4

    hub.log.clear()
    again = await mirror.ready(source("hf://org/large"))
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, first["bytes_total"])
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert hub.log.count() == 1 + 4
    assert hub.log.count("/resolve/") == 0


async def test_a_plan_counts_what_an_earlier_commit_has_in_slabs_as_there(mirror: MirrorUnderTest, hub: Hub) -> None:
    repository = hub.repo("org/model")
    repository.commit({"a": b"1", "b": b"22", "c": b"333"})
    await mirror.ready(source("hf://org/model"))
    repository.commit({"c": b"4444"})
    plan = await mirror.plan(source("hf://org/model"))
    assert (plan["bytes_to_transfer"], plan["bytes_reused"]) == (4, 3)


# --- A commit that was published before is published again without looking at its files ---
MODEL = {"config.json": b"{}", "weights.bin": b"w" * 1000}
SIZE = 1002


@pytest.fixture
def small_repository(hub: Hub) -> HubRepository:
    repository = hub.repo("org/model")
    repository.commit(MODEL)
    return repository


async def test_an_unchanged_repository_costs_one_request(
    mirror: MirrorUnderTest, hub: Hub, small_repository: HubRepository
) -> None:
    first = await mirror.ready(source("hf://org/model@main", allow_patterns=["*.json", "*.nope"]))
    stored = mirror.chunks()
    hub.log.clear()

    again = await mirror.ready(source("hf://org/model", "/elsewhere", allow_patterns=["*.json", "*.nope"]))

    assert (hub.log.count(), mirror.chunks(), again["id"] == first["id"]) == (1, stored, False)
    assert (again["bytes_transferred"], again["bytes_reused"], again["files_total"]) == (0, 2, 1)
    for same in ("manifest", "warnings", "resolved_revision"):
        assert again["sources"][0][same] == first["sources"][0][same]
    assert again["sources"][0]["warnings"]


@pytest.mark.parametrize("other", ["patterns", "commit", "evicted", "repository"])
async def test_whatever_differs_is_listed(
    mirror: MirrorUnderTest, hub: Hub, small_repository: HubRepository, other: str
) -> None:
    await mirror.ready(source("hf://org/model"))
    wanted = source("hf://org/model")
    match other:
        case "patterns":
            wanted = source("hf://org/model", ignore_patterns=["*.bin"])
        case "commit":
            small_repository.commit({"config.json": b"{ }"})
        case "evicted":
            assert (await mirror.evict(all=True))["bytes_freed"] > SIZE  # documents, too
        case _:
            hub.repo("org/other").commit(MODEL)
            wanted = source("hf://org/other")
    hub.log.clear()

    await mirror.ready(wanted)

    assert hub.log.count("/tree/") == 1


# --- Wrong content is kept as evidence, named in the failure, never published, and harms no other source ---
SMALL = b"the right configuration"


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 0xFF]) + content[1:]


async def test_evicting_everything_leaves_the_evidence(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    calendar = Calendar()
    hub.repo("org/model").commit({"config.json": SMALL})
    hub.fail(flip_byte(), "resolve-cache.*config.json", times=2)
    async with mirror_under_test(tmp_path, tombstone_seconds=0, collect_seconds=0, clock=calendar) as mirror:
        await mirror.failed(source("hf://org/model"))
        hub.repo("org/same").commit({"config.json": flipped(SMALL)})
        await mirror.ready(source("hf://org/same"))
        await mirror.evict(all=True, tier="mirror")
        assert mirror.count("manifests") == 0
        for calendar.days in (0, 29):
            await mirror.collect(grace_seconds=0)
            assert list(mirror.chunks()) == [digest_of(flipped(SMALL)).fanout]
        calendar.days = 31
        collection = await mirror.collect()
        assert {kind["kind"]: kind["count"] for kind in collection["kinds"] if kind["count"]} == {
            "chunks": 1,
            "evidence": 2,
        }
        assert (mirror.chunks(), mirror.count("quarantined_files")) == ({}, 0)


async def pause_never(_: float) -> None:
    pytest.fail("a refusal is not asked again")


async def test_bytes_are_not_read_from_a_refused_address_that_a_listed_host_names(
    upstreams: None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator allows the hub by its name; the link to its CDN is an address that nobody allowed."""
    hub.repo("org/model").commit(MODEL)
    names = Names(monkeypatch)
    names.say("hub.example", ["127.0.0.1"])
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("127.0.0.1", "hub.example"))
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "hub.example")
    async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
        error = await mirror.failed(source("hf://org/model"))
    assert (error["code"], error["details"]["host"]) == ("EGRESS_REFUSED", "127.0.0.1")
    assert hub.log.count("tree", origin="hub") == 1
    assert hub.log.count(origin="cdn") == 0


async def test_what_cannot_fit_the_stores_disk_is_refused_with_figures_before_the_first_byte(
    mirror: MirrorUnderTest, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, size = hub_model(hub), sum(map(len, TREE.values()))
    free = [size - 1]
    monkeypatch.setattr("bdn.store.directory.DirectoryStore.disk", lambda _: StoreDisk(free[0], 10 * size, 1, "/store"))
    error = await mirror.failed(asked)
    assert (error["code"], hub.log.count(origin="cdn"), hub.log.bytes_served("/resolve")) == ("NO_ROOM", 0, 0)
    assert f"{format_size(size)} are needed and {format_size(size - 1)} free" in error["message"]
    free[0] = size
    await mirror.ready(asked)


async def test_the_log_tells_how_each_mirror_ended(
    mirror: MirrorUnderTest, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bdn")
    ready = await mirror.ready(hub_model(hub))
    failed = await mirror.mirror(source("hf://org/absent"))

    told = {record.getMessage(): vars(record) for record in caplog.records}
    assert told["mirror ready"].items() >= {
        "mirror": ready["id"], "bytes": ready["bytes_total"], "transferred": ready["bytes_total"], "levelname": "INFO",
    }.items()  # fmt: skip
    assert told["mirror failed"].items() >= {
        "mirror": failed["id"], "bytes": 0, "levelname": "WARNING", "code": failed["error"]["code"], "error": failed["error"]["message"],
    }.items()  # fmt: skip
    assert all(told[end]["seconds"] >= 0 for end in ("mirror ready", "mirror failed"))


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_request_whose_grant_would_fit_into_no_request_is_refused_with_its_size(
    idle: MirrorUnderTest, dry_run: bool
) -> None:
    sources = [source(f"hf://org/{number}", f"/{'m' * 100}/{number}") for number in range(256)]
    answer = await idle.post(*sources, dry_run=dry_run)
    assert refusal(answer) == (413, "LIMIT_EXCEEDED")
    error = answer.json()["error"]
    assert (error["details"]["limit"], error["details"]["value"] > LONGEST_GRANT) == (LONGEST_GRANT, True)
    assert "send fewer sources" in error["message"]
    assert idle.count("mirrors") == 0
    assert (await idle.post(*sources[:128])).status_code == 202
