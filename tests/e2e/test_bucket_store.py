"""A mirror whose store is a bucket of a real object store, an agent, and the commands: the whole life of a source."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from tests.contract.opening import keys_of
from tests.doubles.hub import Hub
from tests.doubles.seaweed import SeaweedServer
from tests.support.content.bucket_stores import store_environment
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

LARGE = bytes(range(255)) * 70_000  # three chunks
pytestmark = pytest.mark.embedded("it has a bucket by itself")
MODEL = {"config.json": b"{}", "deep/model.safetensors": LARGE, "empty.txt": b"", "a b/\u00fc.txt": b"x"}
SIZE = sum(map(len, MODEL.values()))
SOURCE = "hf://org/model"


@pytest.fixture(scope="module")
def bucket(seaweed: SeaweedServer) -> SeaweedServer:
    seaweed.bucket("weights")
    return seaweed


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, bucket: SeaweedServer) -> Iterator[Shell]:
    root = tmp_path_factory.mktemp("services")
    with Hub() as hub:
        hub.repo("org/model").commit(MODEL)
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url})
        store = store_environment(bucket, "s3://weights/bdn")
        with cluster.mirror(**store), cluster.agent(BDN_OUTAGE_SECONDS="120") as found:  # until a repair is through
            yield found


CHUNKS = 8  # three of the large file, a slab, a page and a root, and those two of the listing


def objects(bucket: SeaweedServer, folder: str) -> list[str]:
    listing = bucket.client.list_objects_v2(Bucket="weights", Prefix=f"bdn/{folder}/")
    return [entry["Key"] for entry in listing.get("Contents", [])]


def ran(shell: Shell, *arguments: str) -> Any:
    done = shell.run(*arguments, "--json")
    assert done.code == 0, done.out + done.err
    return done.document


def test_a_source_lives_in_a_bucket_from_its_mirror_to_its_collection(shell: Shell, bucket: SeaweedServer) -> None:
    mirrored = ran(shell, "bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")
    assert len(objects(bucket, "b3")) == CHUNKS
    assert not (shell.root.parent / "mirror/data/store").exists()

    staged = ran(shell, "bdn", "stage", mirrored["id"], "--job", "train")
    (mount,) = staged["mounts"]
    assert tree(Path(mount["path"])) == MODEL
    assert mount["bytes_from"] == {"node": 0, "cluster": 0, "mirror": SIZE}

    # Somebody overwrites a chunk; the mirror finds it, keeps it for people, and repairs it.
    second = digest_of(LARGE[CHUNK_SIZE : 2 * CHUNK_SIZE])
    place = f"bdn/b3/{second.fanout}"
    bucket.client.put_object(Bucket="weights", Key=place, Body=b"wrong")
    verified = ran(shell, "bdn-admin", "verify", SOURCE, "--tier", "mirror")
    assert verified["status"] == "DONE"
    assert str(second) in json.dumps(verified)
    assert digest_of(bucket.client.get_object(Bucket="weights", Key=place)["Body"].read()) == second
    assert [key.rpartition("-")[2] for key in objects(bucket, "quarantine")] == [second.hex]

    # The node forgets it, and has it again from the bucket.
    assert shell.run("bdn", "unstage", staged["id"]).code == 0
    assert ran(shell, "bdn-admin", "evict", SOURCE, "--tier", "node")["bytes_freed"] == SIZE
    staged = ran(shell, "bdn", "stage", mirrored["id"], "--job", "again")
    assert tree(Path(staged["mounts"][0]["path"])) == MODEL
    assert "its disk" not in shell.run("bdn-admin", "ls").out
    assert shell.run("bdn", "unstage", staged["id"]).code == 0

    # Mirrored again it moves no bytes; evicted and collected it is gone.
    assert ran(shell, "bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")["bytes_transferred"] == 0
    # Once the agent has told that nobody holds it.
    wait_until(lambda: shell.run("bdn-admin", "evict", SOURCE, "--tier", "mirror", "--purge").code == 0)
    assert objects(bucket, "b3") == objects(bucket, "leaving") == objects(bucket, "probe") == []


def figure(shell: Shell, name: str) -> float:
    """One of the mirror's."""
    lines = httpx2.get(f"{shell.environment['BDN_URL']}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split()[0] == name)


def forget(shell: Shell) -> None:
    """The node holds nothing. The mirror hears of what it holds a moment after a stage, and asks for nothing else."""

    def is_empty() -> bool:
        ran(shell, "bdn-admin", "evict", SOURCE, "--tier", "node")
        return not any(path.is_file() for path in (shell.data / "cache/files").rglob("*"))

    wait_until(is_empty, seconds=120, what="an empty cache")


def test_a_node_reads_the_bucket_by_itself_and_the_mirror_repairs_what_that_lacks(
    shell: Shell, bucket: SeaweedServer
) -> None:
    mirrored = ran(shell, "bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")
    forget(shell)
    names = "bdn_mirror_served_bytes_total", "bdn_mirror_located_chunks_total"
    served, located = (figure(shell, name) for name in names)
    staged = ran(shell, "bdn", "stage", mirrored["id"], "--job", "whole")
    assert tree(Path(staged["mounts"][0]["path"])) == MODEL
    assert [figure(shell, name) for name in names] == [
        served,
        located + 5,
    ]  # three chunks, a slab and a page: no byte went through the mirror

    assert shell.run("bdn", "unstage", staged["id"]).code == 0
    forget(shell)
    first, last = LARGE[:CHUNK_SIZE], LARGE[2 * CHUNK_SIZE :]
    lost, wrong = (f"bdn/b3/{digest_of(chunk).fanout}" for chunk in (first, last))
    bucket.client.delete_object(Bucket="weights", Key=lost)
    bucket.client.put_object(Bucket="weights", Key=wrong, Body=b"!" + last[1:])
    staged = ran(shell, "bdn", "stage", mirrored["id"], "--job", "lost")
    assert tree(Path(staged["mounts"][0]["path"])) == MODEL
    held = [bucket.client.get_object(Bucket="weights", Key=key)["Body"].read() for key in (lost, wrong)]
    assert held == [first, last]


def test_a_store_moves_from_a_directory_into_a_bucket_beside_its_mirror_and_a_setting_switches_it(
    bucket: SeaweedServer, tmp_path: Path
) -> None:
    with Hub() as hub:
        repository = hub.repo("org/model")
        repository.commit(MODEL)
        cluster = Cluster(
            tmp_path, {"HF_ENDPOINT": hub.url, "BDN_INFRASTRUCTURE_SECRET_STORE_KEYS": keys_of(bucket.account)}
        )
        machine, user = Shell(tmp_path / "mirror", cluster.extra, is_forked=True), cluster.shell("operator")
        to = ("--to", "s3://weights/moved", "--to-secret", "store-keys", "--to-endpoint", bucket.url)
        copy = ("bdn-admin", "store", "copy", *to)
        with cluster.mirror():
            nothing = machine.run(*copy)
            assert (nothing.code, "holds no chunk: set BDN_STORE" in nothing.err) == (2, True), nothing.err
            ran(user, "bdn", "mirror", SOURCE, "--wait")
            planned = ran(machine, *copy, "--dry-run")
            assert (planned["chunks_missing"], planned["chunks_total"], planned["chunks_copied"]) == (CHUNKS, CHUNKS, 0)

            # One chunk is wrong: it is named, and repaired beside the copy.
            second = digest_of(LARGE[CHUNK_SIZE : 2 * CHUNK_SIZE])
            path = machine.data / "store/chunks" / second.fanout
            path.chmod(0o600)
            path.write_bytes(b"wrong")
            done = machine.run(*copy, "--json")
            assert (done.code, done.document["chunks_copied"], done.document["chunks_missing"]) == (1, CHUNKS - 1, 1)
            assert [item["chunk"] for item in done.document["wrong"]] == [str(second)]
            assert str(second) in machine.run(*copy).out
            ran(user, "bdn-admin", "verify", SOURCE, "--tier", "mirror")
            assert f"lacks nothing of {CHUNKS} chunks" in machine.run(*copy).out

            # What comes before the mirror stops is copied once it has.
            repository.commit({**MODEL, "late.bin": b"!" * CHUNK_SIZE})
            mirrored = ran(user, "bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")
        assert ran(machine, *copy)["chunks_copied"] == 5  # the new chunk, and documents

        repository.disabled = True
        (machine.data / "store").rename(tmp_path / "old")
        settings = {"STORE": "s3://weights/moved", "STORE_SECRET": "store-keys", "STORE_ENDPOINT": bucket.url}
        switched = {f"BDN_{name}": value for name, value in settings.items()}
        with cluster.mirror(**switched), cluster.agent() as node:
            collected = ran(user, "bdn-admin", "gc", "--grace", "0s")
            assert collected["bytes_freed"] == 0
            assert {kind["count"] for kind in collected["kinds"]} == {0}
            staged = ran(node, "bdn", "stage", mirrored["id"], "--job", "train")
            assert tree(Path(staged["mounts"][0]["path"])) == {**MODEL, "late.bin": b"!" * CHUNK_SIZE}
        again = Shell(machine.root, {**cluster.extra, **switched}, is_forked=True).run(*copy)
        assert (again.code, "is the store that is to be copied" in again.err) == (2, True), again.err
