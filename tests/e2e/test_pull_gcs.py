"""``bdn pull gs://…`` as a user calls it, against the strict double: everything between the URI and the files is real."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.faults import flip_byte
from tests.doubles.gcs import GcsServer
from tests.doubles.gcs_objects import GcsBucket
from tests.support.content.trees import tree
from tests.support.services.commands import Finished, Shell

FILES = {
    "config.json": b"{}",
    "empty": b"",
    "nested/tok+en izer%.json": b"[]",
    "nested/unicode-\u00fc\u4e2d.txt": b"x" * 100_000,
    "weights.bin": bytes(range(256)) * 70_000,  # three chunks
}


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def bucket(gcs: GcsServer) -> GcsBucket:
    bucket = gcs.bucket("weights")
    bucket.put({f"models/m/{path}": content for path, content in FILES.items()})
    return bucket


@pytest.fixture
def shell(tmp_path: Path, gcs: GcsServer) -> Shell:
    secret = json.dumps(gcs.account.key(gcs.token_url))
    own = {"STORAGE_EMULATOR_HOST": gcs.url, "BDN_GOOGLE_TOKEN_URL": gcs.token_url, "BDN_SECRET_GCS": secret}
    return Shell(tmp_path, own, is_forked=True)


def pull(shell: Shell, uri: str, into: str) -> Finished:
    return shell.run("bdn", "pull", uri, into, "--secret", "GCS", "--json")


def test_a_folder_of_a_private_bucket_is_pulled_once_and_no_secret_stays_behind(
    shell: Shell, gcs: GcsServer, bucket: GcsBucket, tmp_path: Path
) -> None:
    pulled = [pull(shell, f"gs://{bucket.name}/models/m", f"out{number}") for number in range(2)]

    assert [done.code for done in pulled] == [0, 0], pulled[0].err
    assert tree(tmp_path / "out0") == tree(tmp_path / "out1") == FILES
    assert gcs.log.bytes_served("alt=media") == sum(map(len, FILES.values()))
    tokens = {request.headers["authorization"].split()[1] for request in gcs.log.find(origin="gcs")}
    secrets = [gcs.account.pem.splitlines()[5], *gcs.tokens.assertions, *tokens]  # the first: a line of the key
    left = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    left += [f"{done.out}{done.err}".encode() for done in pulled]
    assert (len(left) > 5, len(secrets)) == (True, 1 + 2 + 2)
    assert not [secret for secret in secrets if any(secret.encode() in content for content in left)]


def test_one_object_that_is_stored_compressed_is_pulled_as_it_is_stored(
    shell: Shell, bucket: GcsBucket, tmp_path: Path
) -> None:
    stored = gzip.compress(b"x" * 1000, mtime=0)
    bucket.put({"tokenizer.json": stored}, encoding="gzip")

    pulled = pull(shell, f"gs://{bucket.name}/tokenizer.json", "out")

    assert pulled.code == 0, pulled.err
    assert tree(tmp_path / "out") == {"tokenizer.json": stored}


def test_bytes_that_do_not_fit_google_s_crc32c_are_not_delivered(
    shell: Shell, gcs: GcsServer, bucket: GcsBucket, tmp_path: Path
) -> None:
    gcs.fail(flip_byte(1_000_000), r"weights\.bin\?alt=media", times=None)

    pulled = pull(shell, f"gs://{bucket.name}/models/m", "out")

    assert pulled.code == 1
    assert "CHECKSUM_MISMATCH" in pulled.out + pulled.err
    assert not (tmp_path / "out").exists()
