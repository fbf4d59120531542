"""What TLS costs the data plane: the same chunks with and without it, in turn, and the CPU time of both sides.

``python -m bench.tls FOLDER [CERTIFICATE KEY]`` is the server, in a process of its own; it prints its port.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.net.chunk_server.server import ChunkServer
from bdn.net.http1.pool import ConnectionPool
from bdn.net.tls import Authorities, certificate
from bdn.store.directory import DirectoryStore
from bdn.wire.http_fields import chunk_path
from bench import disk
from bench.report import RUNS, Figure, Row, ratios, scaled_size
from tests.support.content.shelves import Shelf
from tests.support.network.authority import new_authority
from tests.support.services.processes import cpu_seconds

_SIZE, _THREADS = 2 * 1024**3, 4


@dataclass
class _Side:
    """One server, and what was measured of it."""

    url: str
    pid: int
    pool: ConnectionPool
    rates: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)  # CPU seconds per GB
    taken: list[float] = field(default_factory=list)

    def run(self, chunks: Sequence[Digest]) -> None:
        """Read them all once, by threads as agents have them, and compare none."""
        gigabytes, todo = len(chunks) * CHUNK_SIZE / 1e9, iter(chunks)
        served, taken, began = cpu_seconds(self.pid), time.process_time(), time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as threads:
            for done in [threads.submit(self._read, todo) for _ in range(_THREADS)]:
                done.result()
        self.rates.append(gigabytes / (time.perf_counter() - began))
        self.taken.append((time.process_time() - taken) / gigabytes)
        self.served.append((cpu_seconds(self.pid) - served) / gigabytes)

    def _read(self, todo: Iterator[Digest]) -> None:
        buffer = memoryview(bytearray(CHUNK_SIZE))
        for chunk in todo:
            with self.pool.get(self.url + chunk_path(chunk), {}, CHUNK_SIZE) as answer:
                assert answer.fill(buffer) == CHUNK_SIZE

    def check(self, chunk: Digest) -> None:
        """What comes is what was asked for."""
        with self.pool.get(self.url + chunk_path(chunk), {}) as answer:
            assert digest_of(answer.read(CHUNK_SIZE)) == chunk


def measure() -> list[Row]:
    """The plain one and the encrypted one in turn."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        store = DirectoryStore(folder / "store")
        chunks = [_put(store) for _ in range(scaled_size(_SIZE) // CHUNK_SIZE)]
        disk.keep(disk.files_below(folder / "store"))
        authority = new_authority(folder, "unused")
        shown = authority.issue(folder, "localhost")
        authorities = Authorities(authority.certificates)
        plain, encrypted = (
            stack.enter_context(_serving(folder / "store", authorities, *files)) for files in ((), shown)
        )
        for _ in range(RUNS):
            for side in (plain, encrypted):
                side.check(chunks[0])
                side.run(chunks)
    return [
        Figure("plain", "GB/s", plain.rates),
        Figure("TLS", "GB/s", encrypted.rates),
        Figure("ratio, pair by pair", "x", ratios(encrypted.rates, plain.rates)),
        Figure("CPU of the server, plain", "s/GB", plain.served),
        Figure("CPU of the server, TLS", "s/GB", encrypted.served),
        Figure("CPU of the client, plain", "s/GB", plain.taken),
        Figure("CPU of the client, TLS", "s/GB", encrypted.taken),
        Figure("CPU of both, ratio, pair by pair", "x", ratios(_both(encrypted), _both(plain))),
    ]


def _both(side: _Side) -> list[float]:
    return [sum(pair) for pair in zip(side.served, side.taken, strict=True)]


def _put(store: DirectoryStore) -> Digest:
    content = os.urandom(CHUNK_SIZE)
    digest = digest_of(content)
    store.put(digest, memoryview(content))
    return digest


@contextmanager
def _serving(folder: Path, authorities: Authorities, *files: Path) -> Iterator[_Side]:
    command = [sys.executable, "-m", "bench.tls", str(folder), *map(str, files)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        port = int(process.stdout.readline())
        scheme = "https" if files else "http"
        with closing(ConnectionPool(timeout_seconds=60, authorities=authorities)) as pool:
            yield _Side(f"{scheme}://localhost:{port}", process.pid, pool)
        process.stdin.close()  # which ends it


def _serve(folder: str, *files: str) -> None:
    shown = certificate("BDN_TLS", *map(Path, files)) if files else None
    with closing(ChunkServer(Shelf(DirectoryStore(Path(folder))), "127.0.0.1", 0, certificate=shown)) as server:
        server.start()
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
