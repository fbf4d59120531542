"""What the data plane costs whoever pushes: chunks by PUT to it, beside the same chunks put straight into a store of the same kind.

``python -m bench.receiver PLACE`` is the server, in a process of its own, with a store in this folder, or in a bucket of
the server at this address. It tells its port, and ends with its input.
"""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.store import MirrorStore
from bdn.net.chunk_server.served_chunks import PushedChunk
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.http1.pool import ConnectionPool
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import push_path
from bench import disk, nginx
from bench.report import RUNS, Figure, Row, ratios, scaled_size
from tests.doubles.seaweed import SeaweedServer
from tests.doubles.sigv4 import Account
from tests.support.content.bucket_stores import s3_context, store_at
from tests.support.content.shelves import Shelf
from tests.support.services.processes import cpu_seconds

_SIZE, _THREADS = 1024**3, 4
_ACCOUNT, _BUCKET = Account("bdn", "seaweed-example-key"), "chunks"
_PUSH = f"mir_{'0' * 24}"
_DAV = "root {root}; dav_methods PUT; create_full_put_path on; client_max_body_size 0; client_body_buffer_size 1m;"

Put = Callable[[Digest, memoryview], None]
_Chunk = tuple[Digest, memoryview]


def measure() -> list[Row]:
    """Into a directory, beside nginx too, and into a bucket of a SeaweedFS on the same machine."""
    content = [_pages(os.urandom(CHUNK_SIZE)) for _ in range(scaled_size(_SIZE) // CHUNK_SIZE)]
    chunks = [(digest_of(one), one) for one in content]
    return [*_compared(chunks, "", nullcontext), *_beside_nginx(chunks), *_compared(chunks, "a bucket: ", _seaweed)]


def _compared(chunks: list[_Chunk], title: str, places: Callable[[str], AbstractContextManager[str]]) -> list[Row]:
    """Both in turn, each into a new store, on a disk that is quiet."""
    gigabytes = len(chunks) * CHUNK_SIZE / 1e9
    pushed, bare, cpu = [], [], []
    for _ in range(RUNS):
        with TemporaryDirectory() as name, places(name) as place, _serving(place) as (put, process):
            disk.settle(Path(name))
            before = cpu_seconds(process)
            pushed.append(gigabytes / _run(chunks, put))
            cpu.append((cpu_seconds(process) - before) / gigabytes)
            with _opened(place) as store:
                assert len(list(store.listed())) == len(chunks)
        with TemporaryDirectory() as name, places(name) as place, _opened(place) as store:
            disk.settle(Path(name))
            bare.append(gigabytes / _run(chunks, store.put))
    return [
        Figure(f"{title}pushed, verified", "GB/s", pushed),
        Figure(f"{title}put into the bare store", "GB/s", bare),
        Figure(f"{title}ratio, pair by pair", "x", ratios(pushed, bare), ">= 0.8"),
        Figure(f"{title}CPU of the server", "s/GB", cpu),
    ]


def _beside_nginx(chunks: list[_Chunk]) -> list[Row]:
    """A directory takes no PUT by itself: nginx writes the same chunks as files there, and they are synced."""
    gigabytes = len(chunks) * CHUNK_SIZE / 1e9
    pushed, written = [], []
    for _ in range(RUNS):
        with TemporaryDirectory() as name, _serving(name) as (put, _process):
            disk.settle(Path(name))
            pushed.append(gigabytes / _run(chunks, put))
        with TemporaryDirectory() as name, nginx.serving(_DAV.format(root=name)) as url, _putting(url, 201) as put:
            disk.settle(Path(name))
            began = time.perf_counter()
            _run(chunks, put)
            subprocess.run(["sync", "-f", name], check=True)
            written.append(gigabytes / (time.perf_counter() - began))
            assert sum(path.stat().st_size for path in disk.files_below(Path(name))) == len(chunks) * CHUNK_SIZE
    return [
        Figure("beside nginx: pushed, verified", "GB/s", pushed),
        Figure("PUT to nginx into a directory, synced", "GB/s", written),
        Figure("beside nginx: ratio, pair by pair", "x", ratios(pushed, written), ">= 0.8"),
    ]


def _pages(content: bytes) -> memoryview:
    """As byte threads have them. Of memory that is not aligned the bare store writes through the page cache, at half the rate."""
    pages = mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    pages.write(content)
    return memoryview(pages)


def _run(chunks: list[_Chunk], put: Put) -> float:
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
def _serving(place: str) -> Iterator[tuple[Put, int]]:
    """What puts a chunk over the network, and the server's process."""
    command = [sys.executable, "-m", "bench.receiver", place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        with _putting(f"http://127.0.0.1:{int(process.stdout.readline())}", 204) as put:
            yield put, process.pid
        process.stdin.close()  # which ends it


@contextmanager
def _putting(url: str, status: int) -> Iterator[Put]:
    """What puts a chunk to the server at this address, which answers so."""
    with closing(ConnectionPool(timeout_seconds=60)) as pool:

        def put(digest: Digest, content: memoryview) -> None:
            with pool.request("PUT", url + push_path(_PUSH, digest), {}, content) as answer:
                assert answer.status == status, answer.read(1000)

        yield put


@contextmanager
def _seaweed(folder: str) -> Iterator[str]:
    """The address of a server that has a bucket."""
    with SeaweedServer(Path(folder) / "server", _ACCOUNT) as server:
        server.bucket(_BUCKET)
        yield server.url


@dataclass
class _Server:
    """One that somebody else has started."""

    url: str
    account: Account = _ACCOUNT


@contextmanager
def _opened(place: str) -> Iterator[MirrorStore]:
    if place.startswith("http://"):
        with store_at(f"s3://{_BUCKET}", s3_context(_Server(place))) as store:
            yield store
    else:
        yield DirectoryStore(Path(place))


@dataclass(frozen=True)
class _Received:
    """A ``ReceivedChunks`` that lets everybody."""

    store: MirrorStore

    def authorize(self, request: PushedChunk) -> str:
        """Nobody is refused."""
        return ""

    def take(self, request: PushedChunk, content: memoryview) -> None:
        self.store.put(request.digest, content)


def _serve(place: str) -> None:
    with (
        _opened(place) as store,
        closing(ChunkServer(Shelf(store), "127.0.0.1", 0, received=_Received(store))) as server,
    ):
        server.start()
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
