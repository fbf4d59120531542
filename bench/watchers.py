"""What it costs two replicas on PostgreSQL that very many watch one mirror: two real ``bdn serve``, streams of events, and requests."""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import asyncpg

from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import MirrorRow
from bench.many_agents import serving
from bench.report import Figure, scaled
from tests.support.mirror.postgres import new_database, postgres
from tests.support.services.processes import cpu_seconds

_SECONDS: Final = 10.0
_TOLD_SECONDS: Final = 1.1  # in which sessions of the server have told their numbers
_ASKING: Final = 8  # requests at once, at each replica
_CHANGES: Final = 2.0  # a second, as a worker tells of its progress
_MIRROR: Final = f"mir_{'0' * 24}"


def measure() -> Sequence[Figure]:
    """Three times each: streams alone, and with as many requests as go."""
    with postgres() as server, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = asyncio.run(new_database(server))
        environment = {"BDN_DATABASE_URL": url}
        replicas = []
        for name in ("one", "two"):
            (Path(folder) / name).mkdir()
            replicas.append(stack.enter_context(serving(Path(folder) / name, environment)))
        return asyncio.run(_measured(url, replicas))


async def _measured(url: str, replicas: Sequence[tuple[int, int]]) -> list[Figure]:
    database = Database(url)
    await _begin(database)
    count = scaled(500)
    streams = [_Stream(replicas[number % 2][0]) for number in range(count)]
    idle: list[float] = []
    busy: list[float] = []
    cores: list[float] = []
    rates: list[float] = []
    p99: list[float] = []
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.follow())
        while not all(stream.events for stream in streams):  # noqa: ASYNC110 - they hear another process
            await asyncio.sleep(0.1)
        changing = group.create_task(_change(database))
        for _ in range(3):
            before, cpu = await _transactions(url), _cpu(replicas)
            await asyncio.sleep(_SECONDS)
            cores.append((_cpu(replicas) - cpu) / _SECONDS)
            after = await _transactions(url)
            idle.append((after - before) / (_SECONDS + _TOLD_SECONDS))
            answers: list[float] = []
            async with asyncio.TaskGroup() as asking:
                for port, _ in [*replicas] * _ASKING:
                    asking.create_task(_ask(port, answers))
            count_of_both = await _transactions(url) - after
            busy.append((count_of_both - idle[-1] * _TOLD_SECONDS) / _SECONDS)
            rates.append(len(answers) / _SECONDS)
            p99.append(1000 * statistics.quantiles(answers, n=100)[98])
        changing.cancel()
        canceled = time.monotonic()
        await _exchange(replicas[0][0], "POST", f"/mirror/{_MIRROR}/cancel")
    await database.close()
    told = [1000 * (stream.done_at - canceled) for stream in streams]
    what = f"{count} streams of events at two replicas, {_CHANGES:g} changes a second"
    return [
        Figure(f"{what}: transactions of the database", "1/s", idle),
        Figure(f"{what}: CPU of both replicas", "cores", cores),
        Figure(f"{what}, and {2 * _ASKING} who ask all the time: answers", "1/s", rates),
        Figure(f"{what}, and {2 * _ASKING} who ask all the time: p99 of an answer", "ms", p99),
        Figure(f"{what}, and {2 * _ASKING} who ask all the time: transactions of the database", "1/s", busy),
        Figure(f"{what}: from a cancellation at one to the end of a stream, p99", "ms", [statistics.quantiles(told, n=100)[98]]),
    ]  # fmt: skip


async def _begin(database: Database) -> None:
    """A mirror at which a worker is that is none of the replicas'."""
    async with database.write() as session:
        request = {"source": "hf://org/model", "mount_location": "/m"}
        await mirrors.insert(session, _MIRROR, "default", "0" * 64, [request], now=time.time())
        row = await session.get_one(MirrorRow, _MIRROR)
        row.status, row.claimed_by, row.claim_expires_at, row.started_at = "SYNCING", "bench", 1e11, time.time()
        await session.flush()
        await mirrors.update_source(session, _MIRROR, 0, status="SYNCING", bytes_total=10**12, files_total=1)


async def _change(database: Database) -> None:
    transferred = 0
    while True:
        transferred += 10**6
        async with database.write() as session:
            await mirrors.update_source(session, _MIRROR, 0, bytes_transferred=transferred)
        await asyncio.sleep(1 / _CHANGES)


def _cpu(replicas: Sequence[tuple[int, int]]) -> float:
    return sum(cpu_seconds(pid) for _, pid in replicas)


async def _transactions(url: str) -> int:
    """How many the server has ended; each of ours is one look, one write, or one trial of a connection."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        await asyncio.sleep(_TOLD_SECONDS)
        query = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


class _Stream:
    """One who follows the mirror to its end."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.events = 0
        self.done_at = 0.0

    async def follow(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        writer.write(f"GET /mirror/{_MIRROR}/events HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n\r\n".encode())
        while line := await reader.readline():
            self.events += line.startswith(b"event: progress")
            if line.startswith(b"event: done"):
                self.done_at = time.monotonic()
                break
        writer.close()


async def _ask(port: int, answers: list[float]) -> None:
    """One request after the other on one connection; adds the seconds of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ends = time.monotonic() + _SECONDS
    while (began := time.monotonic()) < ends:
        writer.write(f"GET /mirror/{_MIRROR} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.split()[1] == b"200", head
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        answers.append(time.monotonic() - began)
    writer.close()


async def _exchange(port: int, method: str, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    writer.write(head.encode())
    answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    assert answer["status"] == "CANCELED", answer
    writer.close()
