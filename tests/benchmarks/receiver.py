"""What the data plane costs whoever pushes: chunks by PUT into a store, beside the same chunks put into one without any network.

``python -m tests.benchmarks.receiver FOLDER`` is the server, in a process of its own, with a store in the folder. It tells its
port, and ends with its input.
"""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.http1.pool import ConnectionPool
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import push_path
from tests.benchmarks import disk
from tests.benchmarks.report import RUNS, Figure, Row, ratios, scaled_size
from tests.support.content.shelves import Shelf
from tests.support.services.processes import cpu_seconds

_SIZE, _THREADS = 1024**3, 4
_PUSH = f"mir_{'0' * 24}"

Put = Callable[[Digest, memoryview], None]


def measure() -> list[Row]:
    """Both in turn, each into a new store, on a disk that is quiet."""
    content = [_pages(os.urandom(CHUNK_SIZE)) for _ in range(scaled_size(_SIZE) // CHUNK_SIZE)]
    chunks = [(digest_of(one), one) for one in content]
    gigabytes = len(chunks) * CHUNK_SIZE / 1e9
    pushed, bare, cpu = [], [], []
    for _ in range(RUNS):
        with TemporaryDirectory() as name, _serving(Path(name)) as (put, process):
            disk.settle(Path(name))
            before = cpu_seconds(process)
            pushed.append(gigabytes / _run(chunks, put))
            cpu.append((cpu_seconds(process) - before) / gigabytes)
            assert len(list(DirectoryStore(Path(name)).stored())) == len(chunks)
        with TemporaryDirectory() as name:
            store = DirectoryStore(Path(name))
            disk.settle(Path(name))
            bare.append(gigabytes / _run(chunks, store.put))
    return [
        Figure("pushed, verified", "GB/s", pushed),
        Figure("put into the bare store", "GB/s", bare),
        Figure("ratio, pair by pair", "x", ratios(pushed, bare), ">= 0.8"),
        Figure("CPU of the server", "s/GB", cpu),
    ]


def _pages(content: bytes) -> memoryview:
    """As byte threads have them. Of memory that is not aligned the bare store writes through the page cache, at half the rate."""
    pages = mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    pages.write(content)
    return memoryview(pages)


def _run(chunks: list[tuple[Digest, memoryview]], put: Put) -> float:
    """Seconds to put them all."""
    todo = iter(chunks)

    def put_some() -> None:
        for digest, content in todo:
            put(digest, content)

    began = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(put_some) for _ in range(_THREADS)]:
            done.result()
    return time.perf_counter() - began


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[Put, int]]:
    """What puts a chunk over the network, and the server's process."""
    command = [sys.executable, "-m", "tests.benchmarks.receiver", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with closing(ConnectionPool(timeout_seconds=60)) as pool:

            def put(digest: Digest, content: memoryview) -> None:
                with pool.request("PUT", url + push_path(_PUSH, digest), {}, content) as answer:
                    assert answer.status == 204, answer.read(1000)

            yield put, process.pid
        process.stdin.close()  # which ends it


@dataclass(frozen=True)
class _Received:
    """A ``ReceivedChunks`` that lets everybody."""

    store: DirectoryStore

    def authorize(self, request: PushedChunk) -> None:
        """Nobody is refused."""

    def take(self, request: PushedChunk, content: memoryview) -> None:
        self.store.put(request.digest, content)


def _serve(folder: str) -> None:
    received = _Received(DirectoryStore(Path(folder)))
    with closing(ChunkServer(Shelf(received.store), "127.0.0.1", 0, received=received)) as server:
        server.start()
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
