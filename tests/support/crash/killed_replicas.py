"""Replicas and workers of a mirror on one PostgreSQL and one bucket, behind a proxy that balances, under a mixed load.

Any of them, and any of their connections to the database, is killed at random. When, is counted in requests: of users, of the bucket
and of the upstream. Users do what our own clients do: what is not answered, or answered by "not now", is asked again.
"""

import asyncio
import signal
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import asyncpg
import httpx2

from bdn.core.errors import BdnError, NotFoundError
from bdn.mirror.app import MirrorService
from bdn.mirror.ingest.worker import CLAIM_SECONDS
from bdn.wire.grants import new_signing_key
from bdn.wire.stage_schema import StageDocument, StageRequest
from tests.doubles.hub import Hub
from tests.doubles.object_server import ObjectServer
from tests.doubles.request_log import LoggedRequest, RequestLog
from tests.support.agent.process import Daemon, Program
from tests.support.content.bucket_stores import store_environment
from tests.support.content.trees import tree
from tests.support.crash.killing_cluster import AT_ONCE, BUDGET, NODES, Kills
from tests.support.crash.mirror_scenario import fill, repositories
from tests.support.mirror.backends import write_keys
from tests.support.mirror.process import SERVE, WORK, ServingProcess, working
from tests.support.mirror.service import Json, MirrorUnderTest, source
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.network.fault_proxy import BalancingProxy
from tests.support.network.ports import free_port
from tests.support.services.forked import Process

LONGEST_SECONDS: Final = 240.0  # on a machine with a hundred other things to do
_HOSTS: Final = ("127.0.0.2", "127.0.0.3")  # of the replicas, which have the same ports
_WORKERS: Final = ("worker-0", "worker-1")
_CONNECTIONS: Final = "connections"
_CLAIMED: Final = "FROM mirrors WHERE claim_expires_at >= extract(epoch FROM clock_timestamp())::float"
_REQUESTS: Final = (1, 80)  # between two kills
# What a killed collector was about to delete is left alone for a quarter of an hour. In proportion:
_SOONER: Final = (
    "from bdn.mirror.db import chunks\nfrom bdn.store import access, bucket_store\n"
    "access._CHANGE_SECONDS, bucket_store.DELETE_SENT_SECONDS = 4, 2.0\n"
    "chunks.PUT_SECONDS = chunks.DELETE_SECONDS = 8.0\n"
)


_Role = Callable[[Random], Awaitable[None]]


@dataclass
class Replicas:
    """The processes, each started again at once. ``waits`` is how long mirrors of killed workers stood still, in seconds.

    ``altered`` is what the code of one that starts now differs by.
    """

    root: Path
    environ: Mapping[str, str]
    database: str
    log: RequestLog
    altered: str = _SOONER
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))
    waits: list[float] = field(default_factory=list)
    _running: dict[str, Process] = field(default_factory=dict)
    _started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, behind one address for each port, until the block ends."""
        api, data = (
            BalancingProxy(("", 0), port=port, targets=deque((host, port) for host in _HOSTS)) for port in self.ports
        )
        with api.running(), data.running():
            async with asyncio.TaskGroup() as group:
                lives = [group.create_task(self._lives(host, partial(self._serving, host))) for host in _HOSTS]
                lives += [group.create_task(self._lives(name, partial(self._working, name))) for name in _WORKERS]
                yield
                for life in lives:
                    life.cancel()

    async def kill(self, random: Random, kills: Kills) -> None:
        """One after the other, until there were enough."""
        async with asyncio.TaskGroup() as group:
            while not kills.enough.is_set():
                await asyncio.to_thread(self.log.wait_for_more, random.randint(*_REQUESTS), LONGEST_SECONDS)
                victim = random.choice([*sorted(self._running), _CONNECTIONS])
                if victim == _CONNECTIONS:
                    await self._kill_connections(random)
                else:
                    process = self._running.pop(victim)
                    process.kill()
                    group.create_task(self._gone_on_with(f":{process.pid}:"))
                kills.count()

    async def restart(self, altered: str) -> None:
        """One after the other ends as it is asked to, and is there again with this code before the next one is."""
        self.altered = _SOONER + altered
        for name in (*_HOSTS, *_WORKERS):
            while name not in self._running:
                await self._next_start()
            self._running.pop(name).send_signal(signal.SIGTERM)
            while name not in self._running:
                await self._next_start()

    async def _next_start(self) -> None:
        self._started.clear()
        async with asyncio.timeout(LONGEST_SECONDS):
            await self._started.wait()

    async def claims_end(self) -> None:
        """Wait until no claim is left. That of a killed worker lasts, and a collection spares what its canceled mirror may count on."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while await self.fetch(f"SELECT id {_CLAIMED}"):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.1)

    async def fetch(self, query: str, *arguments: object) -> list[Any]:
        connection = await asyncpg.connect(self.database)
        try:
            return list(await connection.fetch(query, *arguments))
        finally:
            await connection.close()

    async def _lives(self, name: str, life: Callable[[], AbstractAsyncContextManager[Process]]) -> None:
        while True:
            async with life() as process:
                self._running[name] = process
                self._started.set()
                await process.wait()
            assert name not in self._running, f"{name} ended by itself with {process.returncode}: {self._said(name)}"
            assert process.returncode in (-signal.SIGKILL, 0), f"{name} ended with {process.returncode}"

    def _said(self, name: str) -> str:
        """The end of its log."""
        log = (self.root / name).with_suffix(".log")
        return log.read_text()[-3000:] if log.exists() else ""

    @asynccontextmanager
    async def _serving(self, host: str) -> AsyncIterator[Process]:
        options = ("--host", host, "--port", str(self.ports[0]), "--data-port", str(self.ports[1]))
        command = (*self._altered(SERVE), *options)
        async with await ServingProcess.start(self.root / host, command=command, **self.environ) as process:
            yield process.process

    def _working(self, name: str) -> AbstractAsyncContextManager[Process]:
        return working(self.root / name, self._altered(WORK), **self.environ)

    def _altered(self, command: tuple[str, ...]) -> tuple[str, ...]:
        python, option, code, *arguments = command
        return python, option, self.altered + code, *arguments

    async def _kill_connections(self, random: Random) -> None:
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        found = sorted(row["pid"] for row in await self.fetch(f"SELECT pid {others}"))
        if found:
            chosen = random.sample(found, random.randint(1, len(found)))
            await self.fetch("SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS pid", chosen)

    async def _gone_on_with(self, killed: str) -> None:
        """Mirrors of a worker that was killed are somebody else's, or at their end, when its claims have run out."""
        claimed = (
            "SELECT id, claim_expires_at - extract(epoch FROM clock_timestamp())::float AS left FROM mirrors"
            " WHERE strpos(claimed_by, $1) > 0 AND status = 'SYNCING'"
        )
        began, left = asyncio.get_running_loop().time(), await self.fetch(claimed, killed)
        assert all(row["left"] <= CLAIM_SECONDS + 1 for row in left), left
        async with asyncio.timeout(LONGEST_SECONDS):
            while left:
                await asyncio.sleep(0.1)  # other processes: there is nothing to be notified by
                still = await self.fetch(claimed, killed)
                self.waits += [asyncio.get_running_loop().time() - began] * (len(left) - len(still))
                left = still


@dataclass
class AskingAgain(httpx2.AsyncBaseTransport):
    """What is answered is noted. ``again`` counts what had to be asked again; all has an answer within ``LONGEST_SECONDS``."""

    log: RequestLog
    again: Counter[str] = field(default_factory=Counter)
    _inner: httpx2.AsyncHTTPTransport = field(default_factory=httpx2.AsyncHTTPTransport)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                try:
                    answer = await self._inner.handle_async_request(request)
                    content = await answer.aread()
                except httpx2.TransportError as error:
                    why = type(error).__name__
                else:
                    status, kind = answer.status_code, {"content-type": answer.headers["content-type"]}
                    answer = httpx2.Response(status, headers=kind, content=content, request=request)
                    if status != 503:
                        self.log.add(LoggedRequest(request.method, request.url.path, "users"))
                        return answer
                    assert answer.json()["error"]["retryable"], answer.text
                    why = answer.json()["error"]["code"]
                self.again[why] += 1
                await asyncio.sleep(0.02)  # other processes: there is nothing to be notified by

    async def aclose(self) -> None:
        await self._inner.aclose()


@dataclass
class Users:
    """They ask for ``repositories``. ``evictions`` counts those of each that have ended.

    ``lost`` is what was READY, and could not be had though nobody evicted it; ``wrong`` what had other bytes.
    """

    mirror: MirrorUnderTest
    daemons: list[Daemon]
    again: Counter[str]
    seed: int
    is_over: Callable[[], bool]
    evictions: Counter[str] = field(default_factory=Counter)
    ready: dict[str, Json] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _evicted: set[str] = field(default_factory=set)  # now

    async def ask(self) -> None:
        """All of them, until it is over."""
        stage = [partial(self._stage, daemon) for daemon in self.daemons]
        roles: list[_Role] = [self._mirror, self._mirror, self._mirror, self._evict, *stage]
        async with asyncio.TaskGroup() as group:
            for number, role in enumerate(roles):
                group.create_task(self._again_and_again(role, Random(f"{self.seed} {number}")))

    async def _again_and_again(self, role: _Role, random: Random) -> None:
        while not self.is_over():
            await role(random)

    # --- who mirrors, waits, listens and cancels ---

    async def _mirror(self, random: Random) -> None:
        name = random.choice(sorted(repositories()))
        before = self._evictions(name)
        begun = (await self.mirror.begin(source(f"hf://{name}")))["id"]
        if random.random() < 0.2:
            await self.mirror.canceled(begun)
        document = await (self._listened if random.random() < 0.3 else self.waited)(begun)
        self.ended[f"{document['status']} {(document['error'] or {}).get('code', '')}".strip()] += 1
        if document["status"] == "READY":
            if before is not None and before == self._evictions(name):
                self.ready[name] = document
            self._judge(name, before, await self.read(document["sources"][0]["manifest"]))

    async def waited(self, mirror_id: str) -> Json:
        """The mirror in its terminal state."""
        while (found := await self.mirror.get(f"/mirror/{mirror_id}", wait=10))["status"] in ("PENDING", "SYNCING"):
            pass
        return found

    async def _listened(self, mirror_id: str) -> Json:
        """The same, by the events, which come to their end whatever becomes of who sends them."""
        await self.mirror.http.get(f"/mirror/{mirror_id}/events")
        return await self.waited(mirror_id)

    async def read(self, manifest: str) -> dict[str, bytes] | None:
        """All files, or None when some of it was answered with 404."""
        try:
            return await self.mirror.tree(manifest)
        except NotFoundError:
            return None

    def _judge(self, name: str, before: int | None, found: Mapping[str, bytes] | None) -> None:
        """What was found of something that was READY, and asked for when there had been that many evictions of it."""
        if found is not None and found != repositories()[name]:
            self.wrong.append(name)
        if found is None and before is not None and before == self._evictions(name):
            self.lost.append(f"{name}, {self.ended}")

    @property
    def told(self) -> str:
        """What came of it."""
        return f"ended: {self.ended}; asked again: {self.again}; lost: {self.lost}; wrong: {self.wrong}"

    def _evictions(self, name: str) -> int | None:
        """None: one is under way."""
        return None if name in self._evicted else self.evictions[name]

    # --- who evicts and collects ---

    async def _evict(self, random: Random) -> None:
        name = random.choice(sorted(repositories()))
        if (document := self.ready.pop(name, None)) is not None:
            self._evicted.add(name)
            manifest = document["sources"][0]["manifest"]
            await self.mirror.http.post("/evictions", params={"wait": 5}, json={"manifest": manifest, "tier": "mirror"})
            self._evicted.discard(name)
            self.evictions[name] += 1
        await self.collect()

    async def collect(self) -> None:
        """Somebody carries it out, whoever is killed."""
        asked = await self.mirror.ask("collections")
        while asked["status"] == "RUNNING":
            asked = await self.mirror.get(f"/collections/{asked['id']}", wait=10)
        self.ended[f"collection {asked['status']}"] += 1

    async def finish(self) -> None:
        """Everything that is asked for now comes, whole; nothing in the store is wrong; and all of it can be evicted."""
        daemon = self.daemons[0]
        for name, files in repositories().items():
            document = await self.waited((await self.mirror.begin(source(f"hf://{name}")))["id"])
            assert document["status"] == "READY", document
            assert await self.read(document["sources"][0]["manifest"]) == files
            stage = await daemon.staged("last", document["grant"])
            assert tree(Path(stage.mounts[0].path)) == files
            await daemon.client.unstage(stage.id)
        verified = await self.mirror.ask("verifications", all=True, tier="mirror")
        while verified["status"] == "RUNNING":
            verified = await self.mirror.get(f"/verifications/{verified['id']}", wait=10)
        assert (verified["status"], verified["items"]) == ("DONE", [])
        await self.mirror.ask("evictions", 5, all=True, tier="mirror", force=True)
        await self.collect()

    # --- who stages ---

    async def _stage(self, daemon: Daemon, random: Random) -> None:
        if not self.ready:
            await asyncio.sleep(0.05)  # others mirror
            return
        name = random.choice(sorted(self.ready))
        before, document = self._evictions(name), self.ready[name]
        found: Mapping[str, bytes] | None = None
        try:
            stage = await self._staged(daemon, f"job-{random.randint(0, 3)}", document["grant"])
        except BdnError as error:
            self.ended[f"stage {error.code}"] += 1
            return
        self.ended[f"stage {stage.state} {stage.error.code if stage.error else ''}".strip()] += 1
        if stage.state == "READY":
            found = tree(Path(str(stage.mounts[0].path)))
        self._judge(name, before, found)
        await daemon.client.unstage(stage.id)

    @staticmethod
    async def _staged(daemon: Daemon, job: str, grant: str) -> StageDocument:
        async with asyncio.timeout(LONGEST_SECONDS):
            return await daemon.ended(await daemon.client.stage(StageRequest(job_id=job, grant=grant)))


@asynccontextmanager
async def under_load(
    root: Path, hub: Hub, database: str, seed: int, is_over: Callable[[], bool]
) -> AsyncIterator[tuple[Replicas, Users]]:
    """Replicas on a bucket, and two agents and users of them. At the end all that was asked for ends, is whole, and goes without a rest."""
    fill(hub)
    async with AsyncExitStack() as stack:
        server = ObjectServer()
        server.log, bucket = hub.log, server.bucket("weights")
        stack.enter_context(server)
        environ = {
            "BDN_DATABASE_URL": database,
            **store_environment(server, "s3://weights/bdn"),
            "BDN_GRANT_KEY_FILE": str(write_keys(root / "grant-keys.pem", new_signing_key())),
            "BDN_EGRESS_ALLOW": ALLOW_LOOPBACK,
            "HF_ENDPOINT": hub.url,
            **AT_ONCE,
        }
        replicas, transport = Replicas(root, environ, database, hub.log), AskingAgain(hub.log)
        await stack.enter_async_context(replicas.running())
        client = httpx2.AsyncClient(base_url=replicas.url, transport=transport, timeout=None)
        http = await stack.enter_async_context(client)
        mirror = MirrorUnderTest(cast("MirrorService", None), http, root)
        await mirror.get("/readyz")
        daemons = [await stack.enter_async_context(_agent(replicas, node).daemon()) for node in NODES]
        users = Users(mirror, daemons, transport.again, seed, is_over)
        yield replicas, users
        for row in await replicas.fetch("SELECT id FROM mirrors WHERE status IN ('PENDING', 'SYNCING')"):
            await users.waited(row["id"])
        await replicas.claims_end()
        await users.finish()
        left = [key for key in bucket.held if key.startswith("bdn/b3/")]
        assert not left, (left, users.ended, await replicas.fetch(f"SELECT id, status {_CLAIMED}"))


def _agent(replicas: Replicas, node: str) -> Program:
    """An agent whose cache has no room for everything, so that it goes on asking."""
    given = {"BDN_AGENT_NODE": node, "BDN_AGENT_CACHE_BYTES": str(BUDGET), "BDN_AGENT_BYTE_THREADS": "4"}
    return Program(replicas.root / node, replicas.url, given | {"BDN_OUTAGE_SECONDS": "120"})
