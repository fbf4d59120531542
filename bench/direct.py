"""Into a bucket and out of it: what the mirror takes in, and agents that stage straight from the bucket, beside others at the same server."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.chunk import digest_of
from bench import disk, nginx, peers
from bench.mirrored import PREFIX, ColdStages, Mirrored
from bench.peers_fill import Beside, Offer
from bench.report import FEW_RUNS, Figure, Missing, Row, ratios, scaled_size
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.doubles.seaweed import SeaweedServer
from tests.doubles.sigv4 import Account
from tests.support.content.bucket_stores import store_environment
from tests.support.services import services
from tests.support.services.processes import cpu_seconds, peak_megabytes

_FILES: Final = 4
_SIZE: Final = 2 * 1024**3
_STORE: Final = "store"  # the bucket of the mirrors' chunks
_UPLOADED: Final = "uploaded"  # that of the same files as they are
_ASKED: Final = {peers.S5CMD: ">= 2", peers.RCLONE: ">= 1.1"}


def measure() -> list[Row]:
    """Ingest first: what it leaves in the server is what is read."""
    size = scaled_size(_SIZE)
    with (
        tempfile.TemporaryDirectory() as name,
        nginx.serving_s3({PREFIX: (_FILES, size)}) as source,
        SeaweedServer(Path(name) / "server", Account("a", "b")) as server,  # the keys that all who are measured have
    ):
        bench = _Bench(Path(name), server, source, size)
        return [bench.memory(), *bench.ingest(), *bench.stages()]


@dataclass
class _Spent:
    """CPU of some processes in seconds per GB, one value for each run."""

    gigabytes: float
    cpu: list[float] = field(default_factory=list)

    @contextmanager
    def by(self, pid: int) -> Iterator[None]:
        """This process, while the block runs."""
        before = cpu_seconds(pid)
        yield
        self.cpu.append((cpu_seconds(pid) - before) / self.gigabytes)


@dataclass(frozen=True)
class _Bench:
    root: Path
    server: SeaweedServer
    source: nginx.Origin
    size: int  # of each file

    @property
    def title(self) -> str:
        return f"{_FILES} x {self.size // 1024**2} MiB"

    @property
    def gigabytes(self) -> float:
        return _FILES * self.size / 1e9

    def mirror(self, name: str, delivery: str = "direct", **more: str) -> AbstractContextManager[services.Mirror]:
        """One with its store in the server. It keeps its database below its name."""
        environment = {
            "AWS_ENDPOINT_URL_S3": self.source.url,
            "AWS_REGION": "us-east-1",
            **store_environment(self.server, f"s3://{_STORE}"),
            "BDN_STORE_DELIVERY": delivery,
            **more,
        }
        return services.mirror(self.root / name, **environment)

    def memory(self) -> Row:
        """Of the mirror, while it takes in as many bytes in one file."""
        size = _FILES * self.size
        self.server.bucket(_STORE)
        with Hub() as hub, self.mirror("one-file", HF_ENDPOINT=hub.url) as mirror:
            hub.repo("org/large").commit({"model.safetensors": GeneratedContent(size)})
            mirror.ready("hf://org/large")
            peak = peak_megabytes(mirror.process.pid)
        self.server.drop_bucket(_STORE)
        return Figure(f"1 x {size // 1024**2} MiB into the bucket: memory of the mirror", "MB", (peak,), "<= 600")

    def ingest(self) -> list[Row]:
        """In turn with s5cmd's upload, each into an empty bucket. What the last run has put stays there."""
        ours, theirs = list[float](), list[float]()
        own, server, server_theirs = (_Spent(self.gigabytes) for _ in range(3))
        for run in range(FEW_RUNS):
            for bucket in (_STORE, _UPLOADED):
                if run:
                    self.server.drop_bucket(bucket)
                self.server.bucket(bucket)
            self._settle()
            with (
                self.mirror(f"ingest-{run}") as mirror,
                own.by(mirror.process.pid),
                server.by(self.server.pid),
            ):
                began = time.perf_counter()
                ready = mirror.ready(f"s3://{nginx.BUCKET}/{PREFIX}/")
                ours.append(self.gigabytes / (time.perf_counter() - began))
            assert ready["bytes_transferred"] == _FILES * self.size, ready
            self._settle()
            if not peers.S5CMD.missing():
                with server_theirs.by(self.server.pid):
                    seconds = peers.upload(self.server.url, self.source.folder(PREFIX), _UPLOADED, PREFIX)
                theirs.append(self.gigabytes / seconds)
        title = f"{self.title} into the bucket"
        rows: list[Row] = [
            Figure(f"{title}: mirror", "GB/s", ours),
            Figure(f"{title}: CPU of the mirror", "s/GB", own.cpu),
            Figure(f"{title}: CPU of the server", "s/GB", server.cpu),
        ]
        if not theirs:
            return [*rows, Missing(f"{title}: s5cmd", peers.S5CMD.missing(), ">= 0.8")]
        return [
            *rows,
            Figure(f"{title}: s5cmd", "GB/s", theirs),
            Figure(f"{title}: CPU of the server, for s5cmd", "s/GB", server_theirs.cpu),
            Figure(f"{title}: ratio to s5cmd, pair by pair", "x", ratios(ours, theirs), ">= 0.8"),
        ]

    def stages(self) -> list[Row]:
        """In turn: straight, through a mirror, and others that copy the same chunks, or the same files."""
        last = f"ingest-{FEW_RUNS - 1}"
        with (
            self._mirrored(last, "direct") as straight,
            self._mirrored("through", "proxy") as through,
            straight.agent("agent-direct") as ours,
            through.agent("agent-proxy") as other,
        ):
            direct, proxy = ColdStages(straight, ours), ColdStages(through, other)
            spent = {name: _Spent(self.gigabytes) for name in ("mirror", "server", "proxy", "others")}
            chunks = [Beside(peer, asked, "the same chunks: ") for peer, asked in _ASKED.items()]
            files = [Beside(peer, "", "the same files: ") for peer in _ASKED]
            if not self.server.files(_UPLOADED):
                files = []
            for run in range(FEW_RUNS):
                self._keep(_STORE)
                with spent["mirror"].by(straight.mirror.process.pid), spent["server"].by(self.server.pid):
                    direct.run()
                for one in chunks:
                    one.run(self._chunks, run)
                for one in files:
                    one.run(self._files, run)
                self._keep(_STORE)
                with spent["proxy"].by(through.mirror.process.pid):
                    proxy.run()
            carried = straight.mirror.served_bytes / 1e6
        title = self.title
        rows: list[Row] = [
            Figure(f"{title}: cold stage from the bucket", "GB/s", direct.rates),
            Figure(f"{title}: bytes through the mirror, from the bucket", "MB", (carried,), "<= 0"),
            Figure(f"{title}: CPU of the agent, from the bucket", "s/GB", direct.cpu),
            Figure(f"{title}: CPU of the server, from the bucket", "s/GB", spent["server"].cpu),
            Figure(f"{title}: CPU of the mirror, from the bucket", "s/GB", spent["mirror"].cpu),
            Figure(f"{title}: cold stage through the mirror", "GB/s", proxy.rates),
            Figure(f"{title}: ratio to that, pair by pair", "x", ratios(direct.rates, proxy.rates)),
            Figure(f"{title}: CPU of the mirror, through it", "s/GB", spent["proxy"].cpu),
        ]
        return rows + [row for one in (*chunks, *files) for row in one.rows(direct.rates)]

    @contextmanager
    def _mirrored(self, name: str, delivery: str) -> Iterator[Mirrored]:
        """A mirror that has the files; its chunks are those that are in the bucket already."""
        with self.mirror(name, delivery) as mirror:
            grant = mirror.ready(f"s3://{nginx.BUCKET}/{PREFIX}/")["grant"]
            yield Mirrored(mirror, self.source, grant, _FILES, self.size, self.root)

    @property
    def _chunks(self) -> Offer:
        """The objects that the agent reads. Each is named by its content."""
        total = _FILES * self.size

        def check(target: Path, is_all: bool) -> None:
            copies = disk.files_below(target)
            assert sum(path.stat().st_size for path in copies) == total, target
            for path in copies if is_all else ():
                assert digest_of(path.read_bytes()).hex == path.name, path

        origin = nginx.Origin(self.server.url, Path(_STORE))
        return Offer(origin, "b3", self.gigabytes, self.root, lambda: self._keep(_STORE), check)

    @property
    def _files(self) -> Offer:
        """The files as s5cmd has put them."""
        folder = self.source.folder(PREFIX)

        def check(target: Path, is_all: bool) -> None:
            peers.check(folder, target, content=is_all)

        origin = nginx.Origin(self.server.url, Path(_UPLOADED))
        return Offer(origin, PREFIX, self.gigabytes, self.root, lambda: self._keep(_UPLOADED), check)

    def _keep(self, bucket: str) -> None:
        """The server has these objects in memory."""
        disk.settle(self.root)
        disk.keep(self.server.files(bucket))

    def _settle(self) -> None:
        """What is to be put is in memory, and the disk has nothing else to do."""
        disk.settle(self.root)
        disk.keep(disk.files_below(self.source.folder(PREFIX)))
