"""A mirror and two agents of one ring, each killed again and again at random steps, and started again at once.

The mirror copies, evicts and collects. What it said was READY and nobody evicted is whole, whenever somebody looks.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import httpx2

from bdn.core.chunk import digest_of
from bdn.core.errors import BdnError
from bdn.core.manifest import Root, files_of
from bdn.wire.stage_schema import StageRequest
from tests.doubles.hub import Hub
from tests.support.agent.process import COMMAND, Daemon, Program
from tests.support.content.trees import tree
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.mirror_scenario import repositories
from tests.support.mirror.process import SERVE, ServingProcess
from tests.support.mirror.service import Json, source
from tests.support.network.egress import ALLOW_LOOPBACK
from tests.support.network.ports import free_port
from tests.support.services.forked import Process

NODES: Final = ("node-0", "node-1")
_WITHOUT: Final = sum(map(len, repositories()["org/three"].values()))  # what does not fit beside the others
BUDGET: Final = sum(len(content) for files in repositories().values() for content in files.values()) - _WITHOUT // 2
AT_ONCE: Final = {"BDN_TOMBSTONE_SECONDS": "0", "BDN_COLLECT_GRACE_SECONDS": "0"}  # goes what was evicted
_FROM, _TO = 1, 150  # steps that a life may have


@dataclass
class Kills:
    """How many there were, and how many there shall be."""

    wanted: int
    done: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    def count(self) -> None:
        self.done += 1
        if self.done >= self.wanted:
            self.enough.set()


@dataclass
class Cluster:
    """Where everything lies, and what was READY: the mirrors' documents by repository."""

    root: Path
    hub: Hub
    random: Random
    kills: Kills
    ready: dict[str, Json] = field(default_factory=dict)
    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))

    # --- programs ---

    def program(self, node: str, command: tuple[str, ...] = COMMAND) -> Program:
        given = {"BDN_AGENT_NODE": node, "BDN_AGENT_CACHE_BYTES": str(BUDGET), "BDN_AGENT_BYTE_THREADS": "4"}
        return Program(self.root / node, f"http://127.0.0.1:{self.ports[0]}", given, command)

    @asynccontextmanager
    async def mirror(self, command: tuple[str, ...] = SERVE) -> AsyncIterator[ServingProcess]:
        environ = {"BDN_EGRESS_ALLOW": ALLOW_LOOPBACK, "HF_ENDPOINT": self.hub.url, "BDN_TRANSFERS": "4", **AT_ONCE}
        place = self.root / "mirror"
        command = (*command, "--port", str(self.ports[0]), "--data-port", str(self.ports[1]))
        async with await ServingProcess.start(place, command=command, **environ) as process:
            yield process

    # --- their lives ---

    async def lives_of_mirror(self) -> None:
        """One life after the other, until there were kills enough."""
        fuse = Fuse.at(self.root / "mirror.fuse")
        while not self.kills.enough.is_set():
            fuse.spare()
            async with self.mirror(fuse.command("bdn.cli.main", "serve", "--json")) as process:
                for document in (await process.http.get("/mirror", params={"status": "READY"})).json()["items"]:
                    if document["grant"] is not None:
                        await check_whole(process, document)
                fuse.light(self.random.randint(_FROM, _TO), after=bool(self.random.getrandbits(1)))
                await self._until_dead(process.process, lambda process=process: self._ask_for_mirrors(process))  # type: ignore[misc]

    async def lives_of_agent(self, node: str) -> None:
        """The same of an agent."""
        fuse = Fuse.at(self.root / f"{node}.fuse")
        while not self.kills.enough.is_set():
            fuse.spare()
            async with self.program(node, fuse.command("node_agent.__main__")).daemon() as daemon:
                fuse.light(self.random.randint(_FROM, _TO), after=bool(self.random.getrandbits(1)))
                await self._until_dead(daemon.process, lambda daemon=daemon: self._ask_for_stages(daemon))  # type: ignore[misc]

    async def _until_dead(self, process: Process, ask: Callable[[], Awaitable[None]]) -> None:
        async def asking() -> None:
            while True:
                with suppress(BdnError, httpx2.HTTPError, ValueError, KeyError):
                    await ask()

        waits = [asyncio.create_task(one) for one in (asking(), process.wait(), self.kills.enough.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one
        if process.returncode == -signal.SIGKILL:
            self.kills.count()

    async def _ask_for_mirrors(self, process: ServingProcess) -> None:
        name = self.random.choice(list(repositories()))
        if self.random.random() < 0.5:
            await process.http.post("/collections", json={})  # goes on beside what is asked for next
        if name in self.ready and self.random.random() < 0.4:
            manifest = self.ready.pop(name)["sources"][0]["manifest"]
            await process.http.post("/evictions", params={"wait": 5}, json={"manifest": manifest, "tier": "mirror"})
        document = (await process.http.post("/mirror", json={"weights": [source(f"hf://{name}")]})).json()
        document = (await process.http.get(f"/mirror/{document['id']}", params={"wait": 20})).json()
        if document["status"] == "READY":
            await check_whole(process, document)
            self.ready[name] = document

    async def _ask_for_stages(self, daemon: Daemon) -> None:
        if not self.ready:
            await asyncio.sleep(0.05)  # other processes: there is nothing to be notified by
            return
        name = self.random.choice(list(self.ready))
        request = StageRequest(job_id=f"job-{self.random.randint(0, 3)}", grant=self.ready[name]["grant"])
        stage = await daemon.client.stage(request)
        if self.random.random() < 0.5:
            await daemon.client.stage_by_id(stage.id, 20)
        if self.random.random() < 0.7:
            await daemon.client.unstage(stage.id)

    # --- the end ---

    async def finish(self) -> None:
        """Everything that is asked for now comes, whole, on both nodes; and nothing is left over."""
        async with self.mirror() as mirror:
            grants = {}
            for name in repositories():
                document = await mirror.ended(await mirror.begin(source(f"hf://{name}")))
                assert document["status"] == "READY", document
                grants[name] = document["grant"]
            assert not list(self.root.glob("mirror/store/incoming/*"))
            for node in NODES:
                async with self.program(node).daemon() as daemon:
                    for known in (await daemon.client.stages()).items:
                        await daemon.client.unstage(known.id)
                    for name, grant in grants.items():
                        stage = await daemon.staged("last", grant)
                        assert tree(Path(stage.mounts[0].path)) == repositories()[name]
                        await daemon.client.unstage(stage.id)
                    await self._check_disk(daemon, self.root / node / "cache")
            # By force: an agent's last heartbeat may have told of leases that ended with it.
            for what, body in (("evictions", {"all": True, "tier": "mirror", "force": True}), ("collections", {})):
                done = (await mirror.http.post(f"/{what}", params={"wait": 30}, json=body)).json()
                while done["status"] == "RUNNING":
                    done = (await mirror.http.get(f"/{what}/{done['id']}", params={"wait": 30})).json()
                assert done["status"] == "DONE", done
            assert mirror.behind.chunks() == {}
            assert not [path for path in self.root.glob("mirror/store/*/**/*") if path.is_file()]

    @staticmethod
    async def _check_disk(daemon: Daemon, cache: Path) -> None:
        use = (await daemon.client.cache()).tiers
        whole, chunks, left = _on_disk(cache)
        assert (use["node"].committed, use["node"].reserved) == (whole, 0)
        assert (use["cluster"].committed, use["cluster"].reserved) == (chunks, 0)
        assert not left, left


async def check_whole(mirror: ServingProcess, document: Json) -> None:
    """Every object of what is READY can be read, and is what its name says."""
    manifest = document["sources"][0]["manifest"]
    root = Root.parse(await _read(mirror, f"/manifests/{manifest}", manifest))
    pages = [await _read(mirror, f"/chunks/{page.digest}", str(page.digest)) for page in root.pages]
    for name in {name for file in files_of(pages) for name in file.layout.fetched}:
        await _read(mirror, f"/chunks/{name}", str(name))


async def _read(mirror: ServingProcess, path: str, name: str) -> bytes:
    answer = await mirror.http.get(path)
    assert answer.status_code == 200, (path, answer.text)
    assert str(digest_of(answer.content)) == name
    return answer.content


def _on_disk(cache: Path) -> tuple[int, int, list[Path]]:
    """Bytes of whole files and of the cluster's chunks, each once; and what should not be there."""
    whole = sum(path.stat().st_size for path in cache.glob("files/*/[!.]*"))
    chunks = {path.name: path.stat().st_size for path in cache.glob("cluster/chunks/*/*")}
    patterns = ("filling/*", "files/*/.*", "mounts/*", "cluster/incoming/*")
    return whole, sum(chunks.values()), [path for pattern in patterns for path in cache.glob(pattern)]
