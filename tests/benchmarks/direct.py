"""How fast an agent stages straight from the bucket behind the mirror, beside the same through the mirror, and others at the same bucket."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.benchmarks import disk, nginx, peers
from tests.benchmarks.mirrored import PREFIX, ColdStages, Mirrored
from tests.benchmarks.peers_fill import Beside
from tests.benchmarks.report import FEW_RUNS, Figure, Missing, Row, ratios, scaled_size
from tests.doubles.content import GeneratedContent
from tests.doubles.seaweed import SeaweedServer
from tests.doubles.sigv4 import Account
from tests.support.services import services
from tests.support.services.processes import cpu_seconds

_FILES: Final = 4
_SIZE: Final = 1024**3
_ASKED: Final = {peers.S5CMD: "", peers.RCLONE: ""}


def measure() -> list[Row]:
    """All of them in turn."""
    beside = [Beside(peer, asked) for peer, asked in _ASKED.items()]
    for one in beside:
        if reason := one.peer.missing():
            one.missing = Missing(one.peer.name, reason, one.asked)
    size = scaled_size(_SIZE)
    with tempfile.TemporaryDirectory() as name, _bucket(Path(name), size) as (server, source):
        root = Path(name)
        with (
            _mirrored(root, "direct", server, source, size) as straight,
            _mirrored(root, "proxy", server, source, size) as through,
            straight.agent("agent-direct") as ours,
            through.agent("agent-proxy") as other,
        ):
            direct, proxy = ColdStages(straight, ours), ColdStages(through, other)
            mirrors = {"direct": list[float](), "proxy": list[float]()}
            for run in range(FEW_RUNS):
                disk.keep(disk.files_below(root / "server"))
                for stages, spent in zip((direct, proxy), mirrors.values(), strict=True):
                    process = stages.content.mirror.process.pid
                    before = cpu_seconds(process)
                    stages.run()
                    spent.append((cpu_seconds(process) - before) / stages.content.gigabytes)
                for one in beside:
                    one.run(straight, run)
            carried = straight.mirror.served_bytes / 1e6
    title = f"{_FILES} x {size // 1024**2} MiB"
    rows: list[Row] = [
        Figure(f"{title}: cold stage from the bucket", "GB/s", direct.rates),
        Figure(f"{title}: cold stage through the mirror", "GB/s", proxy.rates),
        Figure(f"{title}: ratio to that, pair by pair", "x", ratios(direct.rates, proxy.rates)),
        Figure(f"{title}: bytes through the mirror, from the bucket", "MB", (carried,), "<= 0"),
        Figure(f"{title}: CPU of the agent, from the bucket", "s/GB", direct.cpu),
        Figure(f"{title}: CPU of the mirror, from the bucket", "s/GB", mirrors["direct"]),
        Figure(f"{title}: CPU of the mirror, through it", "s/GB", mirrors["proxy"]),
    ]
    return rows + [row for one in beside for row in one.rows(direct.rates)]


@contextmanager
def _bucket(root: Path, size: int) -> Iterator[tuple[SeaweedServer, Path]]:
    """SeaweedFS with the source's objects in a bucket, and the same files in a folder."""
    server = SeaweedServer(root / "server")
    server.account = Account("a", "b")  # the keys that all who are measured have
    source = root / "objects" / PREFIX
    source.mkdir(parents=True)
    with server:
        server.bucket(nginx.BUCKET)
        for number in range(_FILES):
            path, content = source / f"{number}.bin", GeneratedContent(size, seed=number)
            with path.open("wb") as file:
                for start in range(0, size, 8 * 1024**2):
                    file.write(content.read(start, min(start + 8 * 1024**2, size)))
            server.client.upload_file(str(path), nginx.BUCKET, f"{PREFIX}/{path.name}")
        yield server, source


@contextmanager
def _mirrored(root: Path, delivery: str, server: SeaweedServer, source: Path, size: int) -> Iterator[Mirrored]:
    """A mirror with its store in the same server."""
    keys = {
        "aws_access_key_id": server.account.access_key_id,
        "aws_secret_access_key": server.account.secret_access_key,
    }
    environment = {
        "AWS_ENDPOINT_URL_S3": server.url,
        "AWS_ACCESS_KEY_ID": server.account.access_key_id,
        "AWS_SECRET_ACCESS_KEY": server.account.secret_access_key,
        "AWS_REGION": "us-east-1",
        "BDN_STORE": f"s3://{server.bucket(delivery)}/bdn",
        "BDN_STORE_SECRET": "store",
        "BDN_SECRET_STORE": json.dumps(keys),
        "BDN_STORE_DELIVERY": delivery,
    }
    with services.mirror(root / f"mirror-{delivery}", **environment) as mirror:
        grant = mirror.ready(f"s3://{nginx.BUCKET}/{PREFIX}/")["grant"]
        os.sync()
        yield Mirrored(mirror, nginx.Origin(server.url, source.parent), grant, _FILES, size, root)
