"""A mirror whose store is a bucket of a real object store, an agent, and the commands: the whole life of a source."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from tests.contract.opening import keys_of
from tests.doubles.hub import Hub
from tests.doubles.seaweed import RealS3
from tests.support.content.bucket_stores import store_environment
from tests.support.content.layouts import pieces
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import Shell, wait_until

LARGE = noise(17 * MIB + 3, 1)  # three chunks
pytestmark = pytest.mark.embedded("it has a bucket by itself")
MODEL = {"config.json": b"{}", "deep/model.safetensors": LARGE, "empty.txt": b"", "a b/\u00fc.txt": b"x"}
SIZE = sum(map(len, MODEL.values()))
SOURCE = "hf://org/model"


@pytest.fixture(scope="module")
def bucket(seaweed: RealS3) -> RealS3:
    seaweed.bucket("weights")
    return seaweed


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, bucket: RealS3) -> Iterator[Shell]:
    root = tmp_path_factory.mktemp("services")
    with Hub() as hub:
        hub.repo("org/model").commit(MODEL)
        cluster = Cluster(root, {"HF_ENDPOINT": hub.url})
        store = store_environment(bucket, "s3://weights/bdn")
        with cluster.mirror(**store), cluster.agent(BDN_OUTAGE_SECONDS="120") as found:  # until a repair is through
            yield found


CHUNKS = 8  # three of the large file, a slab, a page and a root, and those two of the listing


def objects(bucket: RealS3, folder: str) -> list[str]:
    listing = bucket.client.list_objects_v2(Bucket="weights", Prefix=f"bdn/{folder}/")
    return [entry["Key"] for entry in listing.get("Contents", [])]


def test_a_source_lives_in_a_bucket_from_its_mirror_to_its_collection(shell: Shell, bucket: RealS3) -> None:
    mirrored = shell.told("bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")
    assert len(objects(bucket, "b3")) == CHUNKS
    assert not (shell.root.parent / "mirror/data/store").exists()

    staged = shell.told("bdn", "stage", mirrored["id"], "--job", "train")
    (mount,) = staged["mounts"]
    assert tree(Path(mount["path"])) == MODEL
    assert mount["bytes_from"] == {"node": 0, "cluster": 0, "mirror": SIZE}

    # Somebody overwrites a chunk; the mirror finds it, keeps it for people, and repairs it.
    second = digest_of(pieces(LARGE)[1])
    place = f"bdn/b3/{second.fanout}"
    bucket.client.put_object(Bucket="weights", Key=place, Body=b"wrong")
    verified = shell.told("bdn-admin", "verify", SOURCE, "--tier", "mirror")
    assert verified["status"] == "DONE"
    assert str(second) in json.dumps(verified)
    assert digest_of(bucket.client.get_object(Bucket="weights", Key=place)["Body"].read()) == second
    assert [key.rpartition("-")[2] for key in objects(bucket, "quarantine")] == [second.hex]

    # The node forgets it, and has it again from the bucket.
    assert shell.run("bdn", "unstage", staged["id"]).code == 0
    assert shell.told("bdn-admin", "evict", SOURCE, "--tier", "node")["bytes_freed"] == SIZE
    staged = shell.told("bdn", "stage", mirrored["id"], "--job", "again")
    assert tree(Path(staged["mounts"][0]["path"])) == MODEL
    assert "its disk" not in shell.run("bdn-admin", "ls").out
    assert shell.run("bdn", "unstage", staged["id"]).code == 0

    # Mirrored again it moves no bytes; evicted and collected it is gone.
    assert shell.told("bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")["bytes_transferred"] == 0
    # Once the agent has told that nobody holds it.
    wait_until(lambda: shell.run("bdn-admin", "evict", SOURCE, "--tier", "mirror", "--purge").code == 0)
    assert objects(bucket, "b3") == objects(bucket, "leaving") == objects(bucket, "probe") == []


def test_a_store_moves_from_a_directory_into_a_bucket_beside_its_mirror_and_a_setting_switches_it(
    bucket: RealS3, tmp_path: Path
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
            user.told("bdn", "mirror", SOURCE, "--wait")
            planned = machine.told(*copy, "--dry-run")
            assert (planned["chunks_missing"], planned["chunks_total"], planned["chunks_copied"]) == (CHUNKS, CHUNKS, 0)

            # One chunk is wrong: it is named, and repaired beside the copy.
            second = digest_of(pieces(LARGE)[1])
            path = machine.data / "store/chunks" / second.fanout
            path.chmod(0o600)
            path.write_bytes(b"wrong")
            done = machine.run(*copy, "--json")
            assert (done.code, done.document["chunks_copied"], done.document["chunks_missing"]) == (1, CHUNKS - 1, 1)
            assert [item["chunk"] for item in done.document["wrong"]] == [str(second)]
            assert str(second) in machine.run(*copy).out
            user.told("bdn-admin", "verify", SOURCE, "--tier", "mirror")
            assert f"lacks nothing of {CHUNKS} chunks" in machine.run(*copy).out

            # What comes before the mirror stops is copied once it has.
            repository.commit({**MODEL, "late.bin": b"!" * CHUNK_SIZE})
            mirrored = user.told("bdn", "mirror", SOURCE, "--mount", "/app/model", "--wait")
        assert machine.told(*copy)["chunks_copied"] == 5  # the new chunk, and documents

        repository.disabled = True
        (machine.data / "store").rename(tmp_path / "old")
        settings = {"STORE": "s3://weights/moved", "STORE_SECRET": "store-keys", "STORE_ENDPOINT": bucket.url}
        switched = {f"BDN_{name}": value for name, value in settings.items()}
        with cluster.mirror(**switched), cluster.agent() as node:
            collected = user.told("bdn-admin", "gc", "--grace", "0s")
            assert collected["bytes_freed"] == 0
            assert {kind["count"] for kind in collected["kinds"]} == {0}
            staged = node.told("bdn", "stage", mirrored["id"], "--job", "train")
            assert tree(Path(staged["mounts"][0]["path"])) == {**MODEL, "late.bin": b"!" * CHUNK_SIZE}
        again = Shell(machine.root, {**cluster.extra, **switched}, is_forked=True).run(*copy)
        assert (again.code, "is the store to copy from" in again.err) == (2, True), again.err
