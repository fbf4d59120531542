"""Checkpoints of 1 GiB, as real safetensors write them: pushed, seen, and what that costs the one who writes."""

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.net.http1.pool import ConnectionPool
from bdn.wire.http_fields import push_path
from bench import disk
from bench.report import RUNS, Figure, Row, differences, ratios, scaled_size
from tests.doubles.seaweed import SeaweedServer
from tests.support.content.bucket_stores import store_environment
from tests.support.services import services
from tests.support.services.commands import Process, Shell, wait_until
from tests.support.services.processes import cpu_seconds

_SIZE: Final = 1024**3
_JOB: Final = "bt://bench@job1"
_LONGEST_SECONDS: Final = 600
_THREADS: Final = 16  # as many as bdn sync has
_SHARD: Final = 16 * CHUNK_SIZE
_WRITTEN: Final = 2  # checkpoints that a writer makes in a run


def measure() -> list[Row]:
    """One after the other, each with a checkpoint of its own."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with _bench(root / "directory") as bench:
            rows = [
                *bench.pushes("", 2 * RUNS),  # they scatter by half
                *bench.changes(),
                *bench.visible(),
                *bench.writer(),
            ]
        if len(processors := sorted(os.sched_getaffinity(0))) > 1:
            half = len(processors) // 2
            with _bench(root / "apart", processors[:half], processors[half:]) as bench:
                rows += bench.pushes("apart: ", 2 * RUNS)
        with (
            SeaweedServer(root / "server") as server,
            _bench(root / "bucket", **store_environment(server, f"s3://{server.bucket('store')}")) as bench,
        ):
            return [*rows, *bench.pushes("a bucket: ", RUNS)]


class _Bench:
    def __init__(self, mirror: services.Mirror, shell: Shell, folder: Path) -> None:
        self.mirror = mirror
        self.shell = shell
        self.folder = folder
        self.size = scaled_size(_SIZE)

    def write(self, name: str, seed: int = 0) -> Path:
        """A checkpoint in shards, all of random numbers; durable."""
        place = self.folder / name
        place.mkdir()
        random = np.random.default_rng(seed)
        for number, start in enumerate(range(0, self.size, _SHARD)):
            values = random.integers(0, 256, min(_SHARD, self.size - start), dtype=np.uint8)
            save_file({"weights": values}, place / f"model-{number:05}.safetensors")
        os.sync()
        return place

    def pushes(self, title: str, runs: int) -> list[Row]:
        """Beside ``cp`` and ``sync`` of the same files, and chunks of the same size sent by nothing but ``PUT``, in turn."""
        ours, theirs, pusher, server, starts, sent, bare = [], [], [], [], [], [], []
        gigabytes = self.size / 1e9
        for run in range(runs):
            place = self.write(f"checkpoint-{run}", seed=run)
            before = cpu_seconds(self.mirror.process.pid)
            seconds, cpu = self.synced()
            pusher.append(cpu / gigabytes)
            ours.append(gigabytes / seconds)
            server.append((cpu_seconds(self.mirror.process.pid) - before) / gigabytes)
            began = time.perf_counter()
            shutil.copytree(place, self.folder.parent / "copy")
            os.sync()
            theirs.append(gigabytes / (time.perf_counter() - began))
            shutil.rmtree(self.folder.parent / "copy")
            shutil.rmtree(place)
            disk.settle(self.folder)
            start, cpu = self.synced()
            starts.append(cpu / gigabytes)
            sent.append(gigabytes / (seconds - start))
            bare.append(gigabytes / self.put_all())
            disk.settle(self.folder)
        return [
            Figure(f"{title}bdn sync --once", "GB/s", ours),
            Figure(f"{title}a copy beside it, synced", "GB/s", theirs),
            Figure(f"{title}ratio, pair by pair", "x", ratios(ours, theirs)),
            Figure(f"{title}bdn sync without its start", "GB/s", sent),
            Figure(f"{title}the same by PUT alone", "GB/s", bare),
            Figure(f"{title}ratio, pair by pair", "x", ratios(sent, bare), ">= 0.8"),
            Figure(f"{title}CPU of bdn sync, its start included", "s/GB", pusher),
            Figure(f"{title}CPU of a start that finds nothing to push", "s/GB", starts),
            Figure(f"{title}CPU of bdn sync without its start", "s/GB", differences(pusher, starts), "<= 0.8"),
            Figure(f"{title}CPU of the mirror", "s/GB", server),
        ]

    def synced(self) -> tuple[float, float]:
        """Push what there is: the seconds, and those of the CPU."""
        began = time.perf_counter()
        with self.shell.running("bdn", "sync", str(self.folder), _JOB, "--once") as process:
            cpu = _cpu_at_the_end(process)
        return time.perf_counter() - began, cpu

    def put_all(self) -> float:
        """Seconds to send as much to a push by ``PUT``, from memory, each chunk named before."""
        push = self.mirror.http.post("/pushes", json={"source": f"{_JOB}/bare"}).json()
        plane = f"http://127.0.0.1:{push['data_port']}"
        contents = [os.urandom(CHUNK_SIZE) for _ in range(self.size // CHUNK_SIZE)]
        chunks = [(digest_of(one), one) for one in contents]
        with closing(ConnectionPool(timeout_seconds=_LONGEST_SECONDS)) as pool, ThreadPoolExecutor(_THREADS) as threads:

            def put(chunk: tuple[Digest, bytes]) -> None:
                url = plane + push_path(push["push_id"], chunk[0])
                with pool.request("PUT", url, {}, memoryview(chunk[1])) as answer:
                    assert answer.status == 204, answer.read(1000)

            began = time.perf_counter()
            list(threads.map(put, chunks))
            return time.perf_counter() - began

    def changes(self) -> list[Row]:
        """The next checkpoint has some of its chunks anew."""
        rows: list[Row] = []
        self.write("first", seed=100)
        self.sync()
        for percent, asked in ((5, "<= 6"), (10, "<= 11")):
            place = self.folder / f"changed-{percent}"
            shutil.copytree(self.folder / "first", place)
            chunks = self.size // CHUNK_SIZE
            with min(place.iterdir()).open("r+b") as file:
                for index in range(max(1, chunks * percent // 100)):
                    file.seek(index * CHUNK_SIZE + CHUNK_SIZE // 2)
                    file.write(os.urandom(16))
            before = self.pushed_bytes()
            self.sync()
            moved = self.pushed_bytes() - before
            rows.append(
                Figure(f"{percent} % of the chunks are new: sent", "% of the bytes", [100 * moved / self.size], asked)
            )
        return rows

    def visible(self) -> list[Row]:
        """From the last byte, or the rename, until it is listed."""
        with self.shell.running("bdn", "sync", str(self.folder), _JOB):
            self.write("resting", seed=200)
            rested = self.seconds_until("resting")
            self.write("tmp-renamed", seed=201)
            time.sleep(5)  # it was looked at
            (self.folder / "tmp-renamed").rename(self.folder / "renamed")
            renamed = self.seconds_until("renamed")
        return [
            Figure("listed after its last byte", "s", [rested], "<= 45"),
            Figure("listed after it was renamed", "s", [renamed], "<= 15"),
        ]

    def writer(self) -> list[Row]:
        """One who writes checkpoints without end, alone and beside a syncer that pushes them, in turn."""
        alone, beside, sent = [], [], []
        for run in range(2 * RUNS):  # they scatter as pushes do
            self.clear()
            alone.append(self.written(f"alone-{run}", 300 + run))
            self.clear()
            before = self.pushed_bytes()
            with self.shell.running("bdn", "sync", str(self.folder), _JOB, "--settle", "0s"):
                beside.append(self.written(f"beside-{run}", 400 + run))
                sent.append(100 * (self.pushed_bytes() - before) / (_WRITTEN * self.size))
        return [
            Figure("a writer alone", "GB/s", alone),
            Figure("the same beside bdn sync", "GB/s", beside),
            Figure("ratio, pair by pair", "x", ratios(beside, alone), ">= 0.9"),
            Figure("sent meanwhile", "% of the bytes", sent),
        ]

    def clear(self) -> None:
        """So that a syncer finds nothing but what is written beside it."""
        for place in self.folder.iterdir():
            shutil.rmtree(place)
        disk.settle(self.folder)

    def written(self, name: str, seed: int) -> float:
        began = time.perf_counter()
        for part in range(_WRITTEN):
            self.write(f"{name}-{part}", seed * _WRITTEN + part)
        return _WRITTEN * self.size / 1e9 / (time.perf_counter() - began)

    def sync(self) -> None:
        done = self.shell.run("bdn", "sync", str(self.folder), _JOB, "--once")
        assert done.code == 0, done.err

    def pushed_bytes(self) -> float:
        return services.metric(self.mirror.http, "bdn_mirror_pushed_bytes_total")

    def seconds_until(self, name: str) -> float:
        began = time.perf_counter()
        wait_until(lambda: name in self.listed(), seconds=_LONGEST_SECONDS)
        return time.perf_counter() - began

    def listed(self) -> set[str]:
        items = self.mirror.http.get("/checkpoints").json()["items"]
        return {str(item["checkpoint_id"]) for item in items}


@contextmanager
def _bench(
    root: Path, of_mirror: Collection[int] = (), of_job: Collection[int] = (), /, **environment: str
) -> Iterator[_Bench]:
    """A mirror, and a folder that a job writes to. Each has processors of its own, if they are named, as on two machines."""
    root.mkdir()
    with ExitStack() as stack:
        with _on(of_mirror):
            mirror = stack.enter_context(services.mirror(root / "mirror", **environment))
        stack.enter_context(_on(of_job))
        shell = Shell(root / "job", {"BDN_URL": mirror.url})
        shell.root.mkdir()
        bench = _Bench(mirror, shell, root / "out")
        bench.folder.mkdir()
        yield bench


@contextmanager
def _on(processors: Collection[int]) -> Iterator[None]:
    """Processes and threads that are started meanwhile run on these alone, if any are named."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpu_at_the_end(process: Process) -> float:
    """What it has used, looked at until it ends."""
    spent = 0.0
    while process.poll() is None:
        try:
            spent = cpu_seconds(process.pid)
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.01)
    assert process.wait() == 0
    return spent
