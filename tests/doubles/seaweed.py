"""Real servers of the S3 protocol: SeaweedFS in one process, and servers that run already.

    with SeaweedServer(directory) as server:
        bucket = server.bucket("store")

SeaweedFS takes some seconds to start, so a session starts it once.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.doubles.sigv4 import Account
from tests.support.network.network import Host
from tests.support.network.ports import free_port

_WEED: Final = Path(sys.executable).parent / "weed"
_START_SECONDS: Final = 120
_PARTS: Final = ("master", "volume", "filer", "s3")


def _identity(name: str, account: Account, *actions: str) -> dict[str, object]:
    keys = {"accessKey": account.access_key_id, "secretKey": account.secret_access_key}
    return {"name": name, "credentials": [keys], "actions": actions}


class RealS3:
    """A server that runs already, and an account that may create buckets there."""

    def __init__(self, url: str, account: Account) -> None:
        self.url = url
        self.account = account

    def bucket(self, name: str) -> str:
        """A new, empty bucket of the account; its name."""
        self.client.create_bucket(Bucket=name)
        return name

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        """Of the objects whose keys begin so."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", [])}

    def read(self, bucket: str, key: str) -> bytes | None:
        """The object's bytes; None where there is none."""
        try:
            return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except self.client.exceptions.NoSuchKey:
            return None

    def overwrite(self, bucket: str, key: str, content: bytes | None) -> None:
        """Put these there, or nothing."""
        if content is None:
            self.client.delete_object(Bucket=bucket, Key=key)
        else:
            self.client.put_object(Bucket=bucket, Key=key, Body=content)

    @cached_property
    def client(self) -> Any:
        """The AWS client, for what people do by hand."""
        return boto3.session.Session().client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=self.account.access_key_id,
            aws_secret_access_key=self.account.secret_access_key,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )


class SeaweedServer(RealS3):
    """On free ports of the loopback, or in a host of a network; with everything below ``directory``, from ``with`` until its end."""

    def __init__(self, directory: Path, account: Account | None = None, host: Host | None = None) -> None:
        self.stranger = Account("stranger", "stranger")  # may do nothing
        self.pid = 0  # while it runs
        self._address, self._prefix = (host.address, host.prefix) if host else ("127.0.0.1", ())
        self._directory = directory
        self._port = free_port()
        super().__init__(f"http://{self._address}:{self._port}", account or Account("bdn", "seaweed-example-key"))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        (self._directory / "data").mkdir(parents=True)
        identities = [
            _identity("bdn", self.account, "Admin", "Read", "Write", "List", "Tagging"),
            _identity("stranger", self.stranger),
        ]
        (self._directory / "s3.json").write_text(json.dumps({"identities": identities}))
        with self._stack:
            log = self._stack.enter_context((self._directory / "log").open("wb"))
            process = subprocess.Popen(self._command(), stdout=log, stderr=log, cwd=self._directory)
            self.pid = process.pid
            self._stack.callback(process.wait)
            self._stack.callback(process.kill)
            deadline = time.monotonic() + _START_SECONDS
            while not self._takes_a_bucket():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise TimeoutError("SeaweedFS did not start:\n" + (self._directory / "log").read_text()[-4000:])
                time.sleep(0.1)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def drop_bucket(self, name: str) -> None:
        """With all that is in it."""
        self.client.delete_bucket(Bucket=name)

    def files(self, bucket: str) -> list[Path]:
        """Where the contents of a bucket's objects lie."""
        return sorted((self._directory / "data").glob(f"{bucket}_*.dat"))

    def _command(self) -> list[str]:
        ports = [f"-{part}.port.grpc={free_port()}" for part in _PARTS]
        ports += [f"-{part}.port={self._port if part == 's3' else free_port()}" for part in _PARTS]
        return [
            *self._prefix,
            *(str(_WEED), f"-logdir={self._directory}", "server", f"-dir={self._directory / 'data'}"),
            *(f"-ip={self._address}", f"-ip.bind={self._address}"),
            *("-filer", "-s3", f"-s3.config={self._directory / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-master.volumePreallocate=false"),
            *("-volume.max=500", "-volume.preStopSeconds=0"),  # each bucket takes volumes of its own
            *ports,
        ]

    def _takes_a_bucket(self) -> bool:
        connection = HTTPConnection(self._address, self._port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            connection.getresponse()
            self.client.create_bucket(Bucket="started")
            self.client.put_object(Bucket="started", Key="k", Body=b"x")
        except (OSError, BotoCoreError, ClientError):
            return False
        finally:
            connection.close()
        return True
