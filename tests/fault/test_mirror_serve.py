"""What ``bdn serve`` says when it cannot start, and what its log never says."""

import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from bdn.mirror.db.database import HEAD
from tests.doubles.hub import Hub
from tests.doubles.s3 import S3Bucket, S3Server
from tests.support.mirror.process import SERVE, ServingProcess, serve
from tests.support.mirror.service import source, with_secret

pytest_plugins = ("tests.support.mirror.fixtures",)


async def test_a_second_mirror_and_a_taken_port_are_in_use_and_the_log_holds_no_secret(
    upstreams: None, hub: Hub, s3: S3Server, bucket: S3Bucket, tmp_path: Path
) -> None:
    hub.repo("org/private", private=True).commit({"model.safetensors": b"weights"})
    bucket.put({"data/a.bin": b"1"})
    async with await ServingProcess.start(tmp_path / "first") as mirror:
        # Another mirror on the same data directory.
        status, document, log = await serve(tmp_path / "first", "--port", "0", "--data-port", "0")
        assert (status, document["error"]["code"]) == (3, "IN_USE")
        assert str(mirror.process.pid) in document["error"]["message"]
        assert "Traceback" not in log
        # Another mirror on the same port, with a data directory of its own.
        port = mirror.url.rpartition(":")[2]
        status, document, log = await serve(tmp_path / "second", "--port", port, "--data-port", "0")
        assert (status, document["error"]["code"]) == (3, "IN_USE")
        assert f"port {port}" in document["error"]["message"]
        assert "Traceback" not in log
        with closing(sqlite3.connect(tmp_path / "second/mirror.sqlite")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (HEAD,)
        # The first one has noticed nothing of either.
        private = source("hf://org/private", "/p", **with_secret("hub-token"))
        objects = source(f"s3://{bucket.name}/data", "/d", **with_secret("s3-keys"))
        assert (await mirror.ended(await mirror.begin(private, objects)))["status"] == "READY"
        assert (await mirror.ended(await mirror.begin(source("hf://org/private"))))["error"]["code"] == "AUTH_REQUIRED"
        assert await mirror.end(signal.SIGTERM) == 0
    assert mirror.log.count("manifest published") == 2
    for secret in (hub.token, s3.account.secret_access_key, s3.account.access_key_id, "X-Amz-Signature", "Traceback"):
        assert secret not in mirror.log


async def test_a_mirror_loads_the_sdk_of_a_scheme_when_somebody_asks_for_it_and_no_other(
    upstreams: None, hub: Hub, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"a.txt": b"1"})
    loaded: list[set[str]] = []
    for number, asked in enumerate([[], [source("hf://org/model")]]):
        command = (sys.executable, "-X", "importtime", *SERVE[1:])
        async with await ServingProcess.start(tmp_path / str(number), command=command) as mirror:
            if asked:
                assert (await mirror.ended(await mirror.begin(*asked)))["status"] == "READY"
            assert await mirror.end(signal.SIGTERM) == 0
        imported = {line.rpartition("|")[2].strip() for line in mirror.log.splitlines()}
        assert "bdn.mirror.app" in imported
        loaded.append({"huggingface_hub", "aiobotocore", "gcsfs"} & imported)
    assert loaded == [set(), {"huggingface_hub"}]
