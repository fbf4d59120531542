"""A source goes in at ``POST /mirror`` and comes out as a manifest, a layout and chunks; or fails for good, and harms no other."""

import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import flip_byte, stall
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.s3 import S3Bucket, S3Server
from tests.doubles.s3_numbers import NAME, NumberedBucket
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source, until, with_secret
from tests.support.network.egress_streets import Names, note_attempts

pytest_plugins = ("tests.support.mirror.fixtures",)
LARGE = GeneratedContent(CHUNK_SIZE + 5)
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
TREE: dict[str, bytes] = {**AWKWARD, "config.json": b"{}", "sub/model.safetensors": LARGE.read(0, LARGE.size)}


def hub_model(hub: Hub, name: str = "org/model", files: dict[str, Any] | None = None, **kind: Any) -> Json:
    hub.repo(name, **kind).commit(files or TREE)
    return source(f"hf://{name}")


def s3_folder(bucket: S3Bucket, prefix: str = "llama", files: dict[str, bytes] | None = None) -> Json:
    bucket.put({f"{prefix}/{path}": content for path, content in (files or TREE).items()})
    return source(f"s3://{bucket.name}/{prefix}", **with_secret("s3-keys"))


@pytest.mark.parametrize("upstream", ["hf", "s3"])
async def test_what_is_read_back_from_the_mirror_is_the_upstream_s_tree(
    mirror: MirrorUnderTest, hub: Hub, s3: S3Server, bucket: S3Bucket, upstream: str
) -> None:
    wanted = hub_model(hub) if upstream == "hf" else s3_folder(bucket)
    document = await mirror.ready(wanted)
    size = sum(map(len, TREE.values()))
    assert document["files_total"] == len(TREE)
    assert document["bytes_total"] == document["bytes_transferred"] == size
    assert document["bytes_reused"] == 0
    assert await mirror.tree(document["sources"][0]["manifest"]) == TREE
    served = hub.log.find(method="GET", origin="cdn") if upstream == "hf" else s3.log.find("llama/", method="GET")
    assert sum(request.bytes_served for request in served) >= LARGE.size
    assert mirror.count("copied_chunks") == 0


async def test_only_a_changed_file_moves(mirror: MirrorUnderTest, hub: Hub) -> None:
    repo = hub.repo("org/model")
    repo.commit(TREE)
    await mirror.ready(source("hf://org/model"))
    repo.commit({"config.json": b'{"changed": true}'})
    hub.log.clear()
    document = await mirror.ready(source("hf://org/model"))
    assert document["bytes_transferred"] == 17
    assert [request.target for request in hub.log.find("/resolve") if "config.json" not in request.target] == []
    assert hub.log.count(origin="cdn") == 0
    assert (await mirror.tree(document["sources"][0]["manifest"]))["config.json"] == b'{"changed": true}'


async def test_only_a_changed_object_moves(mirror: MirrorUnderTest, s3: S3Server, bucket: S3Bucket) -> None:
    wanted = s3_folder(bucket)
    await mirror.ready(wanted)
    bucket.put({"llama/config.json": b"[]"})  # of the same size: the ETag tells
    s3.log.clear()
    assert (await mirror.ready(wanted))["bytes_transferred"] == 2
    assert s3.log.count("llama/", method="GET") == s3.log.count("llama/config.json", method="GET") == 1


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
    assert document["bytes_transferred"] == LARGE.size + 3  # an upstream's checksum is no proof of equal bytes
    assert len(mirror.chunks().keys() - stored.keys()) == 1
    assert mirror.count("contents") == 4


async def test_equal_files_within_a_source_are_read_once(mirror: MirrorUnderTest, hub: Hub) -> None:
    document = await mirror.ready(hub_model(hub, files={"a.bin": LARGE, "b.bin": LARGE, "c.txt": b""}))
    assert (document["bytes_transferred"], document["bytes_reused"]) == (LARGE.size, LARGE.size)
    assert hub.log.bytes_served(origin="cdn") == LARGE.size


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


async def test_a_source_that_stands_twice_in_a_request_is_read_once(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_model(hub, files={"model.safetensors": LARGE})
    document = await mirror.ready(wanted, {**wanted, "mount_location": "/again"})
    assert (document["bytes_transferred"], document["bytes_reused"]) == (LARGE.size, LARGE.size)
    assert document["sources"][0]["manifest"] == document["sources"][1]["manifest"]


async def test_a_source_is_pinned_to_what_its_branch_was(mirror: MirrorUnderTest, hub: Hub) -> None:
    repo = hub.repo("org/model")
    sha = repo.commit({"a.txt": b"1"})
    repo.tag("v1")
    repo.commit({"a.txt": b"22"})
    document = await mirror.ready(source("hf://org/model@v1"))
    assert document["sources"][0]["resolved_revision"] == sha
    assert await mirror.tree(document["sources"][0]["manifest"]) == {"a.txt": b"1"}


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


async def test_a_file_that_another_mirror_brings_meanwhile_is_not_read_again(mirror: MirrorUnderTest, hub: Hub) -> None:
    files = {f"{number:03}.bin": Random(number).randbytes(100) for number in range(70)}
    wanted = hub_model(hub, files=files)
    hub.fail(stall(), "/tree/", skip=1)  # the second mirror has listed, and does not know it yet
    hub.fail(stall(), origin="cdn", times=1)
    first = await mirror.begin(wanted)
    await until(lambda: hub.log.count(origin="cdn"))
    second = await mirror.begin({**wanted, "mount_location": "/second"})
    hub.release_stalled()
    documents = [await mirror.ended(mirror_id["id"]) for mirror_id in (first, second)]
    assert sum(document["bytes_transferred"] for document in documents) == 7000
    assert hub.log.bytes_served(origin="cdn") == 7000


# --- Listings of a mirror: narrowed where patterns allow it, few requests, and nothing read where nothing changed ---
FILES = 3500


@pytest.fixture
def repository(hub: Hub) -> HubRepository:
    """Four pages of a hub; all files have one of a few contents, so that they are copied in no time."""
    repository = hub.repo("org/large")
    repository.commit(
        {
            **{f"data/{number // 500}/{number:05}.txt": b"%d" % (number % 5) for number in range(FILES - 2)},
            "weights/a.txt": b"a",
            "config.json": b"{}",
        }
    )
    return repository


@pytest.fixture
def numbers(upstreams: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[NumberedBucket]:
    """Three pages of a bucket."""
    with NumberedBucket(2500) as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bucket.url)
        yield bucket


async def test_an_unchanged_source_is_decided_by_its_listing_alone(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    first = await mirror.ready(source("hf://org/large"))
    assert first["files_total"] == FILES
    repository.commit({})  # another commit with the same files, so that nothing is recalled
    hub.log.clear()

    plan = await mirror.plan(source("hf://org/large"))
    assert (plan["files"], plan["bytes_to_transfer"]) == (FILES, 0)
    assert hub.log.count() == 1 + 4

    hub.log.clear()
    again = await mirror.ready(source("hf://org/large"))
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, first["bytes_total"])
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert hub.log.count() == 1 + 4
    assert hub.log.count("/resolve/") == 0


async def test_an_unchanged_bucket_is_known_by_its_listing(numbers: NumberedBucket, mirror: MirrorUnderTest) -> None:
    wanted = source(f"s3://{NAME}/")
    first = await mirror.ready(wanted)
    assert (first["files_total"], first["bytes_transferred"]) == (len(numbers.keys), numbers.bytes_total)
    assert numbers.log.count() == 3 + len(numbers.keys)  # pages, and each object once

    numbers.log.clear()
    assert (await mirror.plan(wanted))["bytes_to_transfer"] == 0
    again = await mirror.ready(wanted)
    assert (again["bytes_transferred"], again["bytes_reused"]) == (0, numbers.bytes_total)
    assert again["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert numbers.log.count() == numbers.log.count("list-type=2") == 3 + 3

    numbers.log.clear()
    numbers.generation += 1
    assert (await mirror.plan(wanted))["bytes_to_transfer"] == numbers.bytes_total  # the double does tell changes


async def test_a_pattern_with_a_literal_beginning_lists_its_folder_alone(
    mirror: MirrorUnderTest, hub: Hub, repository: HubRepository
) -> None:
    document = await mirror.ready(source("hf://org/large", allow_patterns=["weights/*"]))
    assert (document["files_total"], document["sources"][0]["warnings"]) == (1, [])
    assert [request.target.partition("?")[0].rpartition("/")[2] for request in hub.log.find("/tree/")] == ["weights"]


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
            assert (await mirror.evict(all=True))["bytes_freed"] == SIZE
        case _:
            hub.repo("org/other").commit(MODEL)
            wanted = source("hf://org/other")
    hub.log.clear()

    await mirror.ready(wanted)

    assert hub.log.count("/tree/") == 1


async def test_access_is_asked_for_again(mirror: MirrorUnderTest, hub: Hub) -> None:
    """What one request could read with its secret is not recalled for one that has none."""
    hub.repo("org/private", private=True).commit(MODEL)
    await mirror.ready(source("hf://org/private", **with_secret("hub-token")))

    error = await mirror.failed(source("hf://org/private"))

    assert error["code"] == "AUTH_REQUIRED"


# --- Wrong content is kept as evidence, named in the failure, never published, and harms no other source ---
SMALL = b"the right configuration"


def flipped(content: bytes) -> bytes:
    return bytes([content[0] ^ 0xFF]) + content[1:]


async def test_evicting_everything_leaves_the_evidence(upstreams: None, hub: Hub, tmp_path: Path) -> None:
    days = [0]
    hub.repo("org/model").commit({"config.json": SMALL})
    hub.fail(flip_byte(), "resolve-cache.*config.json", times=2)
    clock = lambda: time.time() + days[0] * 86400  # noqa: E731
    async with mirror_under_test(tmp_path, tombstone_seconds=0, collect_seconds=0, clock=clock) as mirror:
        await mirror.failed(source("hf://org/model"))
        hub.repo("org/same").commit({"config.json": flipped(SMALL)})
        await mirror.ready(source("hf://org/same"))
        await mirror.evict(all=True, tier="mirror")
        assert mirror.count("manifests") == 0
        for days[0] in (0, 29):
            await mirror.collect(grace_seconds=0)
            assert list(mirror.chunks()) == [digest_of(flipped(SMALL)).fanout]
        days[0] = 31
        collection = await mirror.collect()
        assert {kind["kind"]: kind["count"] for kind in collection["kinds"] if kind["count"]} == {"evidence": 2}
        assert (mirror.chunks(), mirror.count("quarantined_files")) == ({}, 0)


# --- R2 through the whole mirror, at the address that the operator's setting names ---
NUMBERS = count()
IN_R2 = GeneratedContent(CHUNK_SIZE + 5).read(0, CHUNK_SIZE + 5)


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
    files = {"large.bin": IN_R2, "sub/a b+c%.json": b"{}", "empty": b""}
    r2_bucket.put({f"m/{path}": content for path, content in files.items()})
    wanted = source(f"r2://4cc0.eu.{r2_bucket.name}/m", **with_secret("s3-keys"))
    done = await r2_mirror.ready(wanted)
    assert await r2_mirror.tree(done["sources"][0]["manifest"]) == files
    s3.log.clear()
    again = await r2_mirror.ready(wanted)
    assert again["sources"][0]["manifest"] == done["sources"][0]["manifest"]
    assert s3.log.count() == s3.log.count("list-type=2") == 2


# --- The egress guard through the whole mirror: a refused upstream fails its source, for good, before anything is sent ---
CONTENT = {"model.safetensors": b"weights" * 1000}


async def pause_never(_: float) -> None:
    pytest.fail("a refusal is not asked again")


async def test_an_endpoint_that_the_operator_configured_is_refused_as_well(
    upstreams: None, hub: Hub, s3: S3Server, bucket: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/model").commit(CONTENT)
    bucket.put(CONTENT)
    monkeypatch.delenv("BDN_EGRESS_ALLOW")
    async with mirror_under_test(tmp_path / "mirror", pause=pause_never) as mirror:
        attempts = note_attempts(monkeypatch)
        for wanted in (source("hf://org/model"), source(f"s3://{bucket.name}", **with_secret("s3-keys"))):
            error = await mirror.failed(wanted)
            assert (error["code"], error["details"]["host"]) == ("EGRESS_REFUSED", "127.0.0.1")
            assert "BDN_EGRESS_ALLOW" in error["message"]
    assert not attempts
    assert (hub.log.count(), s3.log.count()) == (0, 0)


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
