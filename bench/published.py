"""A manifest of very many files on its way through a mirror, which goes on answering others."""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx2

from bdn.mirror.db.database import Database
from bdn.wire.grants import new_signing_key
from bench import generated_mirror
from bench.report import Figure, scaled
from tests.support.mirror.backends import write_keys
from tests.support.mirror.generated import SOURCE
from tests.support.mirror.postgres import new_database, postgres
from tests.support.services import services
from tests.support.services.processes import cpu_seconds, peak_megabytes


def measure() -> Sequence[Figure]:
    """A manifest of very many files of 100 bytes, from its plan to its collection, while agents and callers go on asking."""
    with postgres() as server:
        url = asyncio.run(_new_database(server))
        return [*_published("SQLite", {}), *_published("PostgreSQL", {"BDN_DATABASE_URL": url})]


async def _new_database(server: str) -> str:
    url = await new_database(server)
    database = Database(url)
    await database.migrate()
    await database.close()
    return url


def _published(title: str, environment: dict[str, str]) -> Iterator[Figure]:
    files = scaled(1_000_000)
    command = ("python", "-m", generated_mirror.__name__, str(files))
    own = {"PYTHONPATH": str(Path(__file__).parents[1]), "BDN_TOMBSTONE_SECONDS": "1", **environment}
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        own["BDN_GRANT_KEY_FILE"] = str(write_keys(Path(folder) / "grant-keys.pem", new_signing_key()))
        mirror = stack.enter_context(services.mirror(Path(folder) / "mirror", None, command, **own))
        pid = mirror.process.pid

        def step(name: str, work: Callable[[], Any], memory: str) -> Iterator[Figure]:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
            what, cpu, began = f"{title}, {files} files, {name}", cpu_seconds(pid), time.monotonic()
            with _Meanwhile(mirror.url) as meanwhile:
                work()
            yield Figure(f"{what}: time", "s", (time.monotonic() - began,))
            yield Figure(f"{what}: CPU", "s", (cpu_seconds(pid) - cpu,))
            yield Figure(f"{what}: memory", "MB", (peak_megabytes(pid),), memory)
            for kind, seconds in meanwhile.seconds.items():
                if not seconds:
                    continue
                ordered = sorted(seconds)
                yield Figure(f"{what}: {kind} meanwhile, p50", "ms", (1000 * ordered[len(ordered) // 2],))
                p99 = ordered[len(ordered) * 99 // 100]
                yield Figure(f"{what}: {kind} meanwhile, p99", "ms", (1000 * p99,), "< 1000")

        def operation(path: str, **request: Any) -> None:
            document = mirror.http.post(path, json=request).raise_for_status().json()
            while document["status"] in ("PENDING", "RUNNING"):
                time.sleep(0.5)
                document = mirror.http.get(f"{path}/{document['id']}").raise_for_status().json()
            assert document["status"] == "DONE", document

        agents_peak: list[float] = []

        def stage() -> None:
            with services.agent(Path(folder) / "agent", mirror.url) as agent:
                staged = agent.stage(mirror.ready(SOURCE)["grant"], "job")
                assert staged["mounts"][0]["files_total"] == files, staged
                agents_peak.append(agent.peak_megabytes)
                agent.unstage(staged)
            shutil.rmtree(Path(folder) / "agent")

        for name, work, memory in (
            ("plan", lambda: mirror.plan(SOURCE), "< 600"),
            ("mirrored", lambda: mirror.ready(SOURCE), "< 1200"),
            ("mirrored again", lambda: mirror.ready(SOURCE), "< 1200"),
            ("mirrored once more, and staged by an agent", stage, "< 1200"),
            ("eviction rehearsed", lambda: operation("/evictions", all=True, tier="mirror", dry_run=True), "< 1200"),
            ("evicted", lambda: operation("/evictions", all=True, tier="mirror"), "< 1200"),
            ("collection rehearsed", lambda: operation("/collections", dry_run=True, grace_seconds=0), "< 1200"),
            ("collected", lambda: operation("/collections", grace_seconds=0), "< 1200"),
        ):
            for figure in step(name, work, memory):
                print(figure.row(), flush=True)  # each takes minutes
                yield figure
        yield Figure(f"{title}, {files} files, staged: memory of the agent", "MB", agents_peak, "< 1200")


class _Meanwhile(threading.Thread):
    """Sends heartbeats, and posts that write a row, in turn. ``seconds`` that each took, by kind."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {"heartbeats": [], "posts": []}
        self._http = httpx2.Client(base_url=url, timeout=600)
        self._over = threading.Event()

    def run(self) -> None:
        agent = {"node": "n", "cluster": "c", "boot_id": "b", "roles": ["node"], "advertise": None, "version": "1"}
        heartbeat: dict[str, Any] = {**agent, "tiers": {}}
        eviction = {"all": True, "tier": "node", "dry_run": True}
        while not self._over.wait(0.1):
            for kind, path, body in (
                ("heartbeats", "/agents/heartbeat", heartbeat),
                ("posts", "/evictions", eviction),
            ):
                began = time.monotonic()
                self._http.post(path, json=body).raise_for_status()
                self.seconds[kind].append(time.monotonic() - began)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
