"""What it takes to tell what would be collected out of a bucket of very many chunks: the memory of the mirror, and its requests."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import insert

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import TombstoneRow
from tests.benchmarks.opened_objects import CHUNKS, publish
from tests.benchmarks.report import Figure, scaled
from tests.doubles.object_server import Objects, ObjectServer
from tests.support.content.bucket_stores import store_environment
from tests.support.content.names import named
from tests.support.services import services
from tests.support.services.processes import cpu_seconds, peak_megabytes

_PREFIX = "bdn/b3/"
_WRITTEN = "2026-01-01T00:00:00.000Z"


class _Listed(Objects):
    """A bucket that lists chunks which are there as names alone, beside what is put into it."""

    def __init__(self, chunks: Sequence[Digest], clock: Callable[[], float]) -> None:
        super().__init__("store", "x-amz-", clock)
        self._keys = sorted(f"{_PREFIX}{chunk.fanout}" for chunk in chunks)

    def names(self, prefix: str, after: str) -> Sequence[str]:
        if prefix != _PREFIX:
            return super().names(prefix, after)
        first = bisect_right(self._keys, after)
        return self._keys[first : first + self.page_limit + 1]

    def entry(self, name: str) -> str:
        if not name.startswith(_PREFIX):
            return super().entry(name)
        told = f"<Key>{name}</Key><LastModified>{_WRITTEN}</LastModified><ETag>e</ETag><Size>{CHUNK_SIZE}</Size>"
        return f"<Contents>{told}</Contents>"


def measure() -> Sequence[Figure]:
    """A bucket, and one of ten times as many chunks: what grows shows."""
    return [figure for count in (100_000, 1_000_000) for figure in _measure(scaled(count))]


def _measure(count: int) -> Iterator[Figure]:
    """Of ten chunks eight are of a manifest that stays, one is of a manifest that was given up, and nobody has recorded the last."""
    with TemporaryDirectory() as folder, ObjectServer() as server:
        data = Path(folder) / "mirror/data"
        data.mkdir(parents=True)
        known = asyncio.run(_recorded(data, count // 10 // CHUNKS))
        chunks = [*known, *(named(f"nobody's {number}") for number in range(count - len(known)))]
        server.buckets["store"] = _Listed(chunks, server.now)
        with services.mirror(Path(folder) / "mirror", **_environment(server)) as mirror:
            pid = mirror.process.pid
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
            at_rest = peak_megabytes(pid)
            server.log.clear()
            cpu, began = cpu_seconds(pid), time.monotonic()
            kinds = _rehearsed(mirror)
            seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
            assert kinds["chunks"] == count - len(known), kinds
            what = f"bucket of {count} chunks, its collection rehearsed"
            yield Figure(f"{what}: time", "s", (seconds,))
            yield Figure(f"{what}: CPU", "s", (cpu,))
            yield Figure(f"{what}: requests", "", (server.log.count(),), f"<= {count // 1000 + 10}")
            yield Figure(f"{what}: memory", "MB", (peak_megabytes(pid),), "< 600")
            yield Figure(f"{what}: memory before", "MB", (at_rest,))


async def _recorded(data: Path, files: int) -> list[Digest]:
    """What the mirror's database knows: two manifests, one of which was given up long ago."""
    database = Database(f"sqlite+aiosqlite:///{data}/mirror.sqlite")
    await database.migrate()
    _, kept = await publish(database, "kept", 8 * files)
    manifest, given_up = await publish(database, "given up", files)
    row = {"organisation": "o", "manifest": manifest.hex, "created_at": 1.0, "eviction": "evi"}
    async with database.write() as session:
        await session.execute(insert(TombstoneRow), [row])
    await database.close()
    return [*kept, *given_up]


def _environment(server: ObjectServer) -> dict[str, str]:
    return {
        **store_environment(server, "s3://store/bdn"),
        "BDN_SCRUB_SECONDS": "0",
        "BDN_COLLECT_SECONDS": "0",
    }


def _rehearsed(mirror: services.Mirror) -> dict[str, Any]:
    """How many of each kind would go."""
    document = mirror.http.post("/collections", json={"dry_run": True}).raise_for_status().json()
    while document["status"] == "RUNNING":
        path = f"/collections/{document['id']}"
        document = mirror.http.get(path, params={"wait": 60}).raise_for_status().json()
    assert document["status"] == "DONE", document
    return {kind["kind"]: kind["count"] for kind in document["kinds"]}
