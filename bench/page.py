"""What the operator's page costs: a real ``bdn serve`` with a thousand agents, a real Chromium, and fifty viewers of a live map."""

import asyncio
import gzip
import json
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import httpx2

from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bench.many_agents import Fleet, serving
from bench.report import Figure, Missing, Row, scaled
from tests.support.services.browser import CHROMIUM, chromium, tab
from tests.support.services.processes import cpu_seconds

_SECONDS: Final = 10.0
_VIEWERS: Final = 50
_CHANGED: Final = 50  # agents a second whose use differs
_VIEWS: Final = {"Now": "/ui", "Cluster": "/ui/cluster", "Node": "/ui/node?cluster=c&node=node-0"}


def measure() -> Sequence[Row]:
    agents, manifests, mirrors = scaled(1000), scaled(500), scaled(200)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), {}) as (port, pid):
        url = f"sqlite+aiosqlite:///{folder}/mirror/data/mirror.sqlite"
        return asyncio.run(_measured(url, port, pid, (agents, manifests, mirrors)))


async def _measured(url: str, port: int, pid: int, counts: tuple[int, int, int]) -> list[Row]:
    agents, manifests, mirrors = counts
    what = f"{agents} agents of {manifests} manifests, {mirrors} mirrors at work"
    await _begin(url, manifests, mirrors)
    fleet = Fleet(port, pid, agents, manifests)
    await fleet.tell_all()
    address = f"http://127.0.0.1:{port}"
    rows: list[Row] = []
    async with asyncio.TaskGroup() as group, httpx2.AsyncClient(base_url=address, trust_env=False, timeout=60) as http:
        living = group.create_task(_live(url, agents))
        for name, path in _VIEWS.items():
            page = (await http.get(path)).raise_for_status().content
            rows.append(Figure(f"{what}: page {name}", "kB", (len(page) / 1000,), "<= 300"))
            rows.append(
                Figure(f"{what}: page {name}, gzipped as a proxy does", "kB", (len(gzip.compress(page)) / 1000,))
            )
        rows += await _painted(address, what)
        idle = [await _cpu(pid) for _ in range(3)]
        rows.append(Figure(f"{what}: CPU while no viewer looks", "ms/s", idle))
        for name, path in (("Now", "/ui/live/now"), ("Cluster", "/ui/live/cluster")):
            rows.append(await _watched(http, pid, path, f"{what}: {_VIEWERS} viewers of {name}, CPU beyond that", idle))
        living.cancel()
    return rows


async def _live(url: str, agents: int) -> None:
    """Each second the heartbeats of all agents, and other use of some, written past the mirror: it pays for the page alone."""

    def write(turn: int) -> None:
        with closing(sqlite3.connect(url.partition(":///")[2], timeout=30)) as connection, connection:
            connection.execute("UPDATE agents SET last_heartbeat = ?", (time.time(),))
            for number in range(_CHANGED):
                use = {
                    "budget": 1000,
                    "committed": (turn * 37 + number * 11) % 1000,
                    "reserved": 0,
                    "leased": 0,
                    "pressed": 0,
                }
                node = f"node-{(turn * _CHANGED + number) % agents}"
                connection.execute("UPDATE agents SET tiers = ? WHERE node = ?", (json.dumps({"node": use}), node))

    turn = 0
    while True:
        await asyncio.to_thread(write, turn)
        turn += 1
        await asyncio.sleep(1)


async def _painted(address: str, what: str) -> list[Row]:
    if CHROMIUM is None:
        return [Missing("first paint", "no Chromium is installed")]
    rows: list[Row] = []
    async with chromium() as browser:
        for name, path in _VIEWS.items():
            painted = []
            for _ in range(5):
                async with tab(browser, address) as opened:
                    await opened.go(path)
                    await opened.page.screenshot()  # the page is painted
                    entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                    painted.append(float(await opened.page.evaluate(entry)) / 1000)
            rows.append(Figure(f"{what}: first paint of {name}, with an empty browser cache", "s", painted, "<= 1"))
    return rows


async def _watched(http: httpx2.AsyncClient, pid: int, path: str, what: str, idle: Sequence[float]) -> Figure:
    """CPU of the mirror, less what it costs unwatched."""
    streams = [_Viewer() for _ in range(_VIEWERS)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream.look(http, path)) for stream in streams]
        while not all(stream.pieces for stream in streams):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        found = [await _cpu(pid) - min(idle) for _ in range(3)]
        for task in tasks:
            task.cancel()
    return Figure(what, "ms/s", found, "<= 100")


class _Viewer:
    def __init__(self) -> None:
        self.pieces = 0

    async def look(self, http: httpx2.AsyncClient, path: str) -> None:
        async with http.stream("GET", path) as stream:
            async for _ in stream.aiter_bytes():
                self.pieces += 1


async def _cpu(pid: int) -> float:
    """Milliseconds of CPU a second."""
    began, before = time.monotonic(), cpu_seconds(pid)
    await asyncio.sleep(_SECONDS)
    return 1000 * (cpu_seconds(pid) - before) / (time.monotonic() - began)


async def _begin(url: str, manifests: int, mirrors: int) -> None:
    database, now = Database(url), time.time()
    row: dict[str, Any] = {"organisation": "default", "team": "", "created_at": now}
    async with database.write() as session:
        for number in range(manifests + mirrors):
            is_done, mirror_id = number < manifests, f"mir_{number:024x}"
            status = "READY" if is_done else "SYNCING"
            claim = {} if is_done else {"claimed_by": "another", "claim_expires_at": now + 86400}
            times = {"started_at": now - 100, "completed_at": now if is_done else None}
            session.add(
                MirrorRow(id=mirror_id, request_key=mirror_id, status=status, error=None, **row, **claim, **times)
            )
        await session.flush()
        for number in range(manifests + mirrors):
            is_done, source = number < manifests, f"hf://org/model-{number}@main"
            session.add(
                MirrorSourceRow(
                    mirror_id=f"mir_{number:024x}",
                    organisation="default",
                    position=0,
                    request={"source": source, "mount_location": "/m"},
                    source=source,
                    mount_location="/m",
                    status="READY" if is_done else "SYNCING",
                    manifest=f"{number:064x}" if is_done else None,
                    files_total=10,
                    bytes_total=10**11,
                    bytes_transferred=10**11 if is_done else 10**10,
                    warnings=[],
                )
            )
    await database.close()
