"""How fast each side is alone: the data plane that sends chunks, and an agent that takes them in with no disk in its way.

Both are measured with the plainest fast client that the standard library allows, as docs/adr/0010 was.
"""

import http.client
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.wire.http_fields import chunk_path
from bench import disk, nginx
from bench.mirrored import ColdStages, mirrored
from bench.report import RUNS, Figure, Missing, Row, ratios, scaled_size

SERVED, TAKEN = 2 * 1024**3, 4 * 1024**3
THREADS, COLD_THREADS = 4, 8


def measure_chunk_server() -> list[Row]:
    """The same chunk files behind both servers: from memory beside nginx, from the disk beside fio."""
    ours, theirs, cold, direct = [], [], [], []
    with mirrored(1, scaled_size(SERVED)) as content, nginx.serving(f"root {content.mirror.store};") as other:
        store, server = content.mirror.store, content.mirror.data_url
        files = disk.files_below(store)
        gigabytes = len(files) * CHUNK_SIZE / 1e9
        chunks = [chunk_path(Digest(path.name)) for path in files]
        for _ in range(RUNS):
            disk.keep(files)
            ours.append(gigabytes / _pull(server, chunks, THREADS))
            theirs.append(gigabytes / _pull(other, [f"/{path.relative_to(store)}" for path in files], THREADS))
        for _ in range(RUNS):
            disk.drop(files)
            cold.append(gigabytes / _pull(server, chunks, COLD_THREADS))
            disk.drop(files)
            if not disk.missing_fio():
                direct.append(disk.read(store, COLD_THREADS))
    beside: list[Row] = [Missing("cold: fio's direct read", disk.missing_fio(), ">= 0.9")]
    if direct:
        beside = [
            Figure("cold: fio's direct read", "GB/s", direct),
            Figure("cold: ratio, pair by pair", "x", ratios(cold, direct), ">= 0.9"),
        ]
    return [
        Figure("chunk server", "GB/s", ours),
        Figure("nginx", "GB/s", theirs),
        Figure("ratio, pair by pair", "x", ratios(ours, theirs), ">= 0.75"),
        Figure("cold: chunk server", "GB/s", cold),
        *beside,
    ]


def measure_sink() -> list[Row]:
    """The agent beside the plain client."""
    theirs = []
    with (
        mirrored(1, scaled_size(TAKEN)) as content,
        nginx.serving(f"root {content.mirror.store};") as server,
        content.agent("discarding", "discarding") as agent,
    ):
        ours = ColdStages(content, agent, checked=True)
        store = content.mirror.store
        chunks = [f"/{path.relative_to(store)}" for path in disk.files_below(store)]
        for _ in range(RUNS):
            ours.run()
            theirs.append(content.gigabytes / _pull(server, chunks, THREADS))
    return [
        Figure("agent without a disk, verified", "GB/s", ours.rates),
        Figure("prototype from nginx", "GB/s", theirs),
        Figure("ratio, pair by pair", "x", ratios(ours.rates, theirs), ">= 0.7"),
        Figure("CPU of the agent", "s/GB", ours.cpu),
    ]


def _pull(base_url: str, paths: Sequence[str], threads: int) -> float:
    """Seconds to read all these, of at most a chunk each, into memory that is used again; nothing is verified."""
    todo = iter(paths)  # one step of it is one step under the interpreter's lock
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_pull_some, base_url, todo) for _ in range(threads)]:
            done.result()
    return time.perf_counter() - began


def _pull_some(base_url: str, paths: Iterator[str]) -> None:
    memory = mmap.mmap(-1, CHUNK_SIZE)
    buffer = memoryview(memory)
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc)
    for path in paths:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200, (path, answer.status)
        size, done = int(answer.headers["Content-Length"]), 0
        while done < size:
            count = answer.readinto(buffer[done:size])
            assert count, f"{path} ended after {done} bytes"
            done += count
        answer.read()  # so that the connection can be used again
    connection.close()
