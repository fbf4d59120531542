"""What a thousand agents cost the mirror: a real ``bdn serve``, and requests as agents send them. CPU seconds are the mirror's."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.wire.grants import new_signing_key
from bench.report import Figure, scaled
from tests.support.mirror.backends import write_keys
from tests.support.mirror.postgres import new_database, postgres
from tests.support.services.cluster import Cluster
from tests.support.services.processes import cpu_seconds

_SECONDS = 30.0
_USE = {"budget": 1000, "committed": 300, "reserved": 20, "leased": 100, "pressed": 0}


def measure() -> Sequence[Figure]:
    """On SQLite and on PostgreSQL."""
    with postgres() as server:
        url = asyncio.run(new_database(server))
        return [*_measure("SQLite", {}), *_measure("PostgreSQL", {"BDN_DATABASE_URL": url})]


def _measure(title: str, environment: dict[str, str]) -> Iterator[Figure]:
    agents, manifests = scaled(1000), scaled(1000)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), environment) as (port, pid):
        url = environment.get("BDN_DATABASE_URL", f"sqlite+aiosqlite:///{folder}/mirror/data/mirror.sqlite")
        asyncio.run(_publish(url, manifests))
        fleet = Fleet(port, pid, agents, manifests)
        what = f"{title}, {agents} agents of {manifests} manifests"
        seconds = asyncio.run(fleet.tell_all())
        yield Figure(f"{what}: each tells all once", "ms CPU", (1000 * seconds / agents,))
        share, answers = asyncio.run(fleet.wait())
        yield Figure(f"{what}: at the default period", "cores", (share,), "<= 0.3")
        yield Figure(f"{what}: meanwhile the answer to a heartbeat with a change", "ms", answers, "<= 100")
        yield Figure(f"{what}: one manifest changes", "ms CPU", asyncio.run(fleet.change()))
        for path in ("/metrics", "/agents", "/clusters", "/manifests"):
            cpu, wall, size = asyncio.run(fleet.look(path))
            yield Figure(f"{what}: {path} ({size / 1e6:.3g} MB)", "ms CPU", cpu, "<= 100")
            yield Figure(f"{what}: {path}, meanwhile the slowest answer of /healthz", "ms", wall)
        yield from asyncio.run(fleet.evict(what))


@contextmanager
def serving(folder: Path, environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """``bdn serve`` with its database at the newest migration; its port and its process."""
    cluster = Cluster(folder, {}, is_forked=False)
    if environment:
        shell = cluster.shell()
        shell.root.mkdir(exist_ok=True)
        cluster.extra.update(environment)
        cluster.extra["BDN_GRANT_KEY_FILE"] = str(write_keys(folder / "grant-keys.pem", new_signing_key()))
        done = cluster.shell().run("bdn", "migrate")
        assert done.code == 0, done.err
    with cluster.mirror(BDN_SCRUB_SECONDS="0", BDN_COLLECT_SECONDS="0") as process:
        yield cluster.port, process.pid


async def _publish(url: str, count: int) -> None:
    """Mirrors that are READY, as far as lists need them."""
    database = Database(url)
    async with database.write() as session:
        for number in range(count):
            mirror_id = f"mir_{number:024x}"
            session.add(
                MirrorRow(
                    id=mirror_id, organisation="default", request_key=f"{number:064x}", status="READY", created_at=1e9,
                    started_at=1e9, completed_at=1e9, claimed_by=None, claim_expires_at=None, error=None,
                )
            )  # fmt: skip
        await session.flush()
        for number in range(count):
            session.add(
                MirrorSourceRow(
                    mirror_id=f"mir_{number:024x}", position=0, request={}, source=f"hf://org/model-{number}",
                    mount_location="/m", status="READY", resolved_revision="0" * 40, manifest=f"{number:064x}",
                    files_total=1, bytes_total=1, warnings=[], error=None,
                )
            )  # fmt: skip
    await database.close()


class Fleet:
    """Agents that send heartbeats to ``port``."""

    def __init__(self, port: int, pid: int, agents: int, manifests: int) -> None:
        self.port, self.pid, self.agents, self.manifests = port, pid, agents, manifests
        self.epochs: dict[int, int] = {}
        self.digests: dict[int, str] = {}

    def _held(self, count: int, changed: int | None = None) -> list[dict[str, Any]]:
        return [
            {
                "manifest": f"b3:{number:064x}", "bytes": 5 if number != changed else 6, "complete": True, "last_used": 1.8e9,
                "sources": [f"hf://org/model-{number}"], "held_by": [], "cluster_bytes": 0,
            }
            for number in range(count)
        ]  # fmt: skip

    async def _beat(self, number: int, **fields: Any) -> dict[str, Any]:
        state: dict[str, Any] = {
            "node": f"node-{number}",
            "cluster": "c",
            "boot_id": "b",
            "roles": ["node", "cluster"],
            "version": "1",
        }
        state |= {"advertise": f"http://10.0.0.1:{number}", "tiers": {"node": _USE, "cluster": _USE}}
        body = json.dumps(state | {"epoch": self.epochs.get(number)} | fields).encode()
        reply = json.loads(await self._ask("POST", "/agents/heartbeat", body))
        self.epochs[number], self.digests[number] = reply["epoch"], reply["holdings_digest"]
        return dict(reply)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        top, _, content = answer.partition(b"\r\n\r\n")
        assert top.split()[1].startswith(b"2"), answer[:500]
        if b"chunked" in top.lower():
            pieces = []
            while content and (size := int(content.partition(b"\r\n")[0], 16)):
                content = content.partition(b"\r\n")[2]
                pieces.append(content[:size])
                content = content[size + 2 :]
            return b"".join(pieces)
        return content

    async def tell_all(self) -> float:
        """Everybody joins and tells all, a few at a time; the CPU seconds."""
        before, limit = cpu_seconds(self.pid), asyncio.Semaphore(4)

        async def tell(number: int) -> None:
            async with limit:
                held = self._held(self.manifests)
                await self._beat(number)
                for start in range(0, len(held), 1000):
                    change = {
                        "base": self.digests[number] if start else None,
                        "digest": f"{start}",
                        "held": held[start:],
                    }
                    await self._beat(number, changes=change)

        await asyncio.gather(*(tell(number) for number in range(self.agents)))
        return cpu_seconds(self.pid) - before

    async def wait(self) -> tuple[float, list[float]]:
        """Heartbeats are kept open for 10 s each, and every half second one tells a change: cores, and the milliseconds of its answers."""
        ends = time.monotonic() + 15 + _SECONDS

        async def live(number: int) -> None:
            await asyncio.sleep(10 * number / self.agents)
            while time.monotonic() < ends:
                await self._beat(number, wait_seconds=10)

        async with asyncio.TaskGroup() as group:
            for number in range(self.agents):
                group.create_task(live(number))
            await self._beat(self.agents)  # one more, which is not kept open
            await asyncio.sleep(15)
            began, before = time.monotonic(), cpu_seconds(self.pid)
            answers = list[float]()
            while time.monotonic() < began + _SECONDS:
                await asyncio.sleep(0.5)
                asked = time.monotonic()
                await self._tell_change(self.agents, int(10 * asked))
                answers.append(1000 * (time.monotonic() - asked))
            share = (cpu_seconds(self.pid) - before) / (time.monotonic() - began)
        return share, answers

    async def _tell_change(self, number: int, turn: int) -> None:
        change = {"base": self.digests[number], "digest": f"{turn}", "held": self._held(1, turn)}
        await self._beat(number, changes=change)

    async def _slowest(self, work: asyncio.Task[Any]) -> float:
        slowest = 0.0
        while not work.done():
            began = time.monotonic()
            await self._ask("GET", "/healthz")
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.02)
        return slowest

    async def change(self) -> list[float]:
        """Milliseconds of CPU for an agent that tells that one manifest is another."""
        found = []
        for number in range(min(20, self.agents)):
            before = cpu_seconds(self.pid)
            for turn in range(5):
                await self._tell_change(number, turn)
            found.append(1000 * (cpu_seconds(self.pid) - before) / 5)
        return found

    async def look(self, path: str) -> tuple[list[float], list[float], int]:
        """Milliseconds of CPU, the slowest answer of another request meanwhile, and the size of the answer."""
        cpu, wall, answer = [], [], b""
        for _ in range(3):
            before = cpu_seconds(self.pid)
            asking = asyncio.create_task(self._ask("GET", path))
            wall.append(1000 * await self._slowest(asking))
            answer = await asking
            cpu.append(1000 * (cpu_seconds(self.pid) - before))
        return cpu, wall, len(answer)

    async def evict(self, what: str) -> list[Figure]:
        """300 agents answer an eviction with 100 manifests each."""
        agents = min(300, self.agents)
        body = json.dumps({"all": True, "tier": "node", "cluster": "c"}).encode()
        eviction = json.loads(await self._ask("POST", "/evictions", body))["id"]
        before, began = cpu_seconds(self.pid), time.monotonic()
        for number in range(agents):
            items = [
                {"tier": "node", "cluster": "c", "node": f"node-{number}", "manifest": f"b3:{one:064x}", "bytes": 5}
                for one in range(min(100, self.manifests))
            ]
            await self._beat(number, reports=[{"id": eviction, "evict": {"items": items}}])
        cpu, wall = cpu_seconds(self.pid) - before, time.monotonic() - began
        return [
            Figure(f"{what}: {agents} of them answer an eviction of 100 manifests", "s CPU", (cpu,)),
            Figure(f"{what}: {agents} of them answer an eviction of 100 manifests, one after the other", "s", (wall,)),
        ]
