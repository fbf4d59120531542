"""The plainest fast client that the standard library allows: what docs/adr/0010 was measured with."""

import http.client
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from bdn.core.chunk import CHUNK_SIZE


def pull(base_url: str, paths: Sequence[str], threads: int) -> float:
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
