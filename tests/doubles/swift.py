"""OpenStack Swift with its S3 interface: a production object store, as the second server that our S3 sources are tested on.

    with SwiftServer(directory) as server:
        server.bucket("weights").put({"model/config.json": b"{}"})

Nothing of it is ours, signatures and versions least of all. It takes some seconds to start, so a session starts it once.
"""

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, Self

import boto3
from botocore.config import Config

from tests.doubles.sigv4 import Account
from tests.support.network.ports import free_port

_BIN: Final = Path(sys.executable).parent
_STORES: Final = ("account", "container", "object")
_START_SECONDS: Final = 60
PAGE: Final = 5  # keys on a page of a listing, whatever is asked for
_PIPELINE: Final = (
    "catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth copy slo versioned_writes symlink "
    "proxy-server"
)
# Of the proxy's parts, which have no others.
_OPTIONS: Final[dict[str, str]] = {
    "cache": "memcache_servers = 127.0.0.1:1",  # there is none, and Swift does without
    "s3api": f"location = us-east-1\nmin_segment_size = 1\nmax_bucket_listing = {PAGE}",
    "tempauth": "user_test_reader = {reader} .admin\nuser_test_stranger = {stranger}",
    "versioned_writes": "allow_versioned_writes = true\nallow_object_versioning = true",
}
# A ring says where a kind of thing is stored: here always in the one place that there is.
_RINGS: Final = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(sys.argv[2::2], sys.argv[3::2]):
    ring = RingBuilder(4, 1, 0)
    ring.add_dev(dict(region=1, zone=1, weight=1, ip="127.0.0.1", port=int(port), device="disk", meta=""))
    ring.rebalance()
    ring.get_ring().save(f"{sys.argv[1]}/{name}.ring.gz")
"""


class SwiftBucket:
    """A bucket that a test fills with the AWS client."""

    def __init__(self, name: str, client: Any) -> None:
        self.name = name
        self.client = client

    def put(self, objects: Mapping[str, bytes]) -> None:
        for key, content in objects.items():
            self.client.put_object(Bucket=self.name, Key=key, Body=content)


class SwiftServer:
    """On free ports of the loopback, with everything below ``directory``, from ``with`` until its end."""

    def __init__(self, directory: Path) -> None:
        self.account = Account("test:reader", "double/secret+key")
        self.stranger = Account("test:stranger", "stranger")
        self._directory = directory
        self._ports = {name: free_port() for name in (*_STORES, "proxy")}
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['proxy']}"

    def __enter__(self) -> Self:
        for name in ("etc", "run", "disks/disk"):
            (self._directory / name).mkdir(parents=True)
        rings = [text for name in _STORES for text in (name, str(self._ports[name]))]
        subprocess.run([sys.executable, "-c", _RINGS, self._directory / "etc", *rings], check=True)
        with self._stack:
            for name in self._ports:
                self._start(name)
            deadline = time.monotonic() + _START_SECONDS
            while not all(map(self._answers, self._ports.values())):
                if time.monotonic() > deadline:
                    logs = "\n".join(path.read_text() for path in self._directory.glob("run/*.log"))
                    msg = f"Swift did not start in {_START_SECONDS} s:\n{logs}"
                    raise TimeoutError(msg)
                time.sleep(0.05)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def bucket(self, name: str) -> SwiftBucket:
        """A new, empty bucket of the account."""
        self._client.create_bucket(Bucket=name)
        return SwiftBucket(name, self._client)

    @cached_property
    def _client(self) -> Any:
        """The AWS client, to fill buckets with: making one reads the descriptions of all services."""
        return boto3.session.Session().client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=self.account.access_key_id,
            aws_secret_access_key=self.account.secret_access_key,
            config=Config(
                s3={"addressing_style": "path"},
                # Swift takes no checksums from clients, and does not understand bodies that end in one.
                request_checksum_calculation="when_required",
            ),
        )

    def _start(self, name: str) -> None:
        settings = self._directory / "etc" / f"{name}-server.conf"
        settings.write_text(self._settings(name))
        (self._directory / "etc" / "swift.conf").write_text(_SWIFT)
        log = self._stack.enter_context((self._directory / "run" / f"{name}.log").open("wb"))
        command = [_BIN / f"swift-{name}-server", settings]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _settings(self, name: str) -> str:
        common = {
            "bind_ip": "127.0.0.1",
            "bind_port": self._ports[name],
            "workers": 0,
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "swift_dir": self._directory / "etc",
            "devices": self._directory / "disks",
            "mount_check": "false",
            "recon_cache_path": self._directory / "run",
            "log_address": "/dev/null",
        }
        if name != "proxy":
            return _section("DEFAULT", common) + dedent(
                f"""\
                [pipeline:main]
                pipeline = healthcheck {name}-server
                [filter:healthcheck]
                use = egg:swift#healthcheck
                [app:{name}-server]
                use = egg:swift#{name}
                """
            )
        keys = {"reader": self.account.secret_access_key, "stranger": self.stranger.secret_access_key}
        filters = "".join(
            f"[filter:{part}]\nuse = egg:swift#{'memcache' if part == 'cache' else part}\n"
            f"{_OPTIONS.get(part, '').format(**keys)}\n"
            for part in _PIPELINE.split()[:-1]
        )
        app = "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n"
        return _section("DEFAULT", common) + f"[pipeline:main]\npipeline = {_PIPELINE}\n" + filters + app

    @staticmethod
    def _answers(port: int) -> bool:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


_SWIFT: Final = dedent(
    """\
    [swift-hash]
    swift_hash_path_prefix = a
    swift_hash_path_suffix = b
    [storage-policy:0]
    name = only
    default = yes
    """
)


def _section(name: str, values: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
