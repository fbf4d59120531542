"""What a collection of very many chunks takes: planned by a dry run, and carried out in a bucket."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import insert

from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import TombstoneRow
from bench.opened_objects import CHUNKS, publish
from bench.report import Figure, scaled
from tests.doubles.object_server import ObjectServer
from tests.support.content.bucket_stores import store_environment
from tests.support.services import services
from tests.support.services.processes import cpu_seconds, peak_megabytes


def measure() -> Sequence[Figure]:
    """A number of dead chunks, and ten times as many: what grows shows."""
    return [figure for count in (100_000, 1_000_000) for figure in _measure(scaled(count))]


def _measure(count: int) -> Iterator[Figure]:
    """The chunks of a manifest that was given up, beside a tenth as many of one that stays. None has an object in the bucket."""
    with TemporaryDirectory() as folder, ObjectServer() as server:
        data = Path(folder) / "mirror/data"
        data.mkdir(parents=True)
        dead = asyncio.run(_recorded(data, max(10, count // CHUNKS)))
        server.bucket("store")
        with services.mirror(Path(folder) / "mirror", **_environment(server)) as mirror:
            pid, what = mirror.process.pid, f"{dead} dead chunks"

            def step(name: str, work: Callable[[], int], requests: int) -> Iterator[Figure]:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
                server.log.clear()
                cpu, began = cpu_seconds(pid), time.monotonic()
                collected = work()
                seconds, cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
                assert collected == dead, collected
                yield Figure(f"{what}, {name}: time", "s", (seconds,))
                yield Figure(f"{what}, {name}: CPU", "s", (cpu,))
                yield Figure(f"{what}, {name}: requests", "", (server.log.count(),), f"<= {requests}")
                yield Figure(f"{what}, {name}: memory", "MB", (peak_megabytes(pid),), "< 600")

            yield from step("planned", lambda: _collected(mirror, dry_run=True), 10)
            yield from step("collected", lambda: _collected(mirror, dry_run=False), dead + 10)


async def _recorded(data: Path, files: int) -> int:
    """Two manifests, the larger of which was given up long ago: how many chunks that one has."""
    database = Database(f"sqlite+aiosqlite:///{data}/mirror.sqlite")
    await database.migrate()
    await publish(database, "kept", files // 10)
    manifest, given_up = await publish(database, "given up", files)
    row = {"organisation": "o", "manifest": manifest.hex, "created_at": 1.0, "eviction": "evi"}
    async with database.write() as session:
        await session.execute(insert(TombstoneRow), [row])
    await database.close()
    return len(given_up)


def _environment(server: ObjectServer) -> dict[str, str]:
    return {
        **store_environment(server, "s3://store/bdn"),
        "BDN_SCRUB_SECONDS": "0",
        "BDN_COLLECT_SECONDS": "0",
    }


def _collected(mirror: services.Mirror, *, dry_run: bool) -> int:
    """How many chunks go."""
    request = {"dry_run": dry_run, "grace_seconds": 0}
    document: Any = mirror.http.post("/collections", json=request).raise_for_status().json()
    while document["status"] == "RUNNING":
        path = f"/collections/{document['id']}"
        document = mirror.http.get(path, params={"wait": 60}).raise_for_status().json()
    assert document["status"] == "DONE", document
    return int(next(kind["count"] for kind in document["kinds"] if kind["kind"] == "chunks"))
