"""A source goes in at ``POST /mirror`` and comes out as a manifest, a layout and chunks."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.service import Json, MirrorUnderTest, source, until, with_secret

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


@pytest.mark.parametrize("upstream", ["hf", "s3"])
async def test_the_same_request_again_reads_no_byte_and_asks_no_more_than_for_a_listing(
    mirror: MirrorUnderTest, hub: Hub, s3: S3Server, bucket: S3Bucket, upstream: str
) -> None:
    files = {f"shard-{number:05}.json": b"%d" % number for number in range(100)}
    wanted = hub_model(hub, files=files) if upstream == "hf" else s3_folder(bucket, files=files)
    first = await mirror.ready(wanted)
    hub.log.clear()
    s3.log.clear()
    stored = mirror.chunks()
    second = await mirror.ready(wanted)
    assert second["id"] != first["id"]
    assert (second["bytes_transferred"], second["bytes_reused"]) == (0, first["bytes_total"])
    assert second["sources"][0]["manifest"] == first["sources"][0]["manifest"]
    assert mirror.chunks() == stored
    requests = [request for request in hub.log.find() + s3.log.find() if "agent-harnesses" not in request.target]
    assert 0 < len(requests) <= 3 + len(files) / 1000
    assert not [request for request in requests if "/resolve" in request.target or "shard-" in request.target]


async def test_only_a_changed_file_moves(mirror: MirrorUnderTest, hub: Hub) -> None:
    repo = hub.repo("org/model")
    repo.commit(TREE)
    await mirror.ready(source("hf://org/model"))
    repo.commit({"config.json": b'{"changed": true}'})
    hub.log.clear()
    document = await mirror.ready(source("hf://org/model"))
    assert document["bytes_transferred"] == 17
    assert {request.target.partition("?")[0].rpartition("/")[2] for request in hub.log.find("/resolve")} == {
        "config.json"
    }
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


async def test_two_sources_of_one_request_are_two_manifests_under_one_grant(
    mirror: MirrorUnderTest, hub: Hub, bucket: S3Bucket
) -> None:
    model, data = hub_model(hub), {**s3_folder(bucket, "data", {"a.csv": b"1,2"}), "mount_location": "/data"}
    document = await mirror.ready(model, data)
    assert [part["source"] for part in document["sources"]] == [model["source"], data["source"]]
    assert document["files_total"] == len(TREE) + 1
    assert await mirror.tree(document["sources"][1]["manifest"]) == {"a.csv": b"1,2"}


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


async def test_the_truss_body_is_taken_as_it_is(mirror: MirrorUnderTest, hub: Hub, bucket: S3Bucket) -> None:
    hub.repo("Qwen/Qwen3-0.6B").commit({"model.safetensors": b"weights"})
    bucket.put(
        {"training-data/a.safetensors": b"1", "training-data/sub/b.safetensors": b"2", "training-data/c.md": b"3"}
    )
    weights: list[Json] = [
        {"source": "hf://Qwen/Qwen3-0.6B", "mount_location": "/app/models/q", "auth": None, "auth_secret_name": None}
        | {"allow_patterns": None, "ignore_patterns": None},
        {"source": f"s3://{bucket.name}/training-data", "mount_location": "/app/data"}
        | {"auth": {"aws_oidc_role_arn": None, "aws_oidc_region": None, "gcp_oidc_service_account": None}
           | {"gcp_oidc_workload_id_provider": None, "aws_assume_role_arn": None, "aws_assume_role_region": None}
           | {"auth_method": "CUSTOM_SECRET", "auth_secret_name": "s3-keys"}}
        | {"auth_secret_name": None, "allow_patterns": ["*.safetensors"], "ignore_patterns": ["*.md"]},
    ]  # fmt: skip
    job = {"image": {"base_image": "x", "docker_auth": None}, "compute": {"node_count": 1}, "name": None}
    answer = await mirror.http.post("/mirror", json={"training_job": {**job, "weights": weights}})
    assert answer.status_code == 202, answer.text
    document = await mirror.ended(answer.json()["id"])
    assert document["status"] == "READY", document["error"]
    assert await mirror.tree(document["sources"][1]["manifest"]) == {"a.safetensors": b"1"}
    assert (await mirror.mirror(*weights))["bytes_transferred"] == 0


async def test_a_pattern_that_matched_nothing_is_a_warning_that_names_it(mirror: MirrorUnderTest, hub: Hub) -> None:
    wanted = hub_model(hub, files={"config.json": b"{}", "sub/model.safetensors": b"w"})
    document = await mirror.ready({**wanted, "allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["x/"]})
    hint = "; '**/*.safetensors' would have matched: '*' does not cross '/' here"
    assert document["sources"][0]["warnings"] == [
        f"allow_patterns '*.safetensors' matched no file{hint}",
        "ignore_patterns 'x/' matched no file",
    ]


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
    assert all(older <= newer for older, newer in pairwise(sorted(document["created_at"] for document in documents)))
