"""A bucket of very many small objects without a server: the mirror's own code runs, and nothing is asked over HTTP.

with generated(1_000_000):
    # s3://generated/ in this process: data/0000/0000000, data/0000/0000001, …, of 100 bytes each
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from unittest import mock

from bdn.core.source.upstream import Checksum, Identity, Location, Resolution, UpstreamFile
from bdn.core.store import scope_of
from bdn.mirror.ingest import survey
from bdn.transfer.ranged import RangedReader, RangeRequest

SOURCE: Final = "s3://generated/"
_PER_FOLDER: Final = 1000


class GeneratedBucket:
    """Lists ``count`` files of ``size`` bytes."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size

    async def resolve(self) -> Resolution:
        return Resolution(None)

    async def list(self, _: Resolution, within: Sequence[str] = ("",)) -> AsyncIterator[UpstreamFile]:
        scope = scope_of("default")
        for number in range(self.count):
            path = f"data/{number // _PER_FOLDER:04}/{number:07}"
            etag = f"{number:032x}"
            if number % _PER_FOLDER == 0:
                await asyncio.sleep(0)  # as at the end of a page
            if path.startswith(tuple(within)):
                yield UpstreamFile(path, self.size, Identity.of(scope, "s3", path, etag), f"{path} in full", etag)

    async def locate(self, file: UpstreamFile) -> Location:
        return Location(f"http://127.0.0.1:9/{file.path}")


@contextmanager
def generated(count: int, size: int = 100) -> Iterator[None]:
    """Sources of this process are such a bucket. Each file holds its path, over and over."""

    @asynccontextmanager
    async def open_bucket(*_: object) -> AsyncIterator[GeneratedBucket]:
        yield GeneratedBucket(count, size)

    def read_into(
        _: RangedReader, location: Location, request: RangeRequest, buffer: memoryview, __: Callable[[], bool]
    ) -> Checksum | None:
        path = location.url.partition(":9/")[2].encode()
        buffer[:] = (path * (len(buffer) // len(path) + 1))[: len(buffer)]
        return None

    with mock.patch.object(survey, "open_source", open_bucket), mock.patch.object(RangedReader, "read_into", read_into):
        yield
