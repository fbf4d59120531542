"""Two mirrors and a worker on PostgreSQL behind one address, while the keys of grants are changed: no grant is refused."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from bdn.core.chunk import digest_of
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.grants import new_signing_key
from node_agent.app import Agent, open_agent
from node_agent.settings import load_settings
from tests.doubles.hub import Hub
from tests.support.content.trees import tree
from tests.support.crash.rot import rot
from tests.support.mirror.backends import write_keys
from tests.support.mirror.service import MirrorUnderTest, mirror_under_test, source, until

pytestmark = pytest.mark.embedded("it has PostgreSQL and a directory by itself")
pytest_plugins = ("tests.support.mirror.fixtures",)
MIRRORS: Final = 25
PAGES: Final = 6  # of so many grants each, in each of seven rounds: 1,050 grants
CONTENT: Final = bytes(range(256)) * 5000
TOKEN: Final = "operator"


@dataclass
class Process:
    """One process of the mirror with a data directory of its own, which is restarted to read its keys."""

    open: Callable[[], Any]
    mirror: MirrorUnderTest | None = None
    busy: int = 0
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def restart(self) -> None:
        await self.stop()
        self.mirror = await self._stack.enter_async_context(self.open())

    async def stop(self) -> None:
        """No new requests; those that it has are answered; then it ends."""
        mirror, self.mirror = self.mirror, None
        if mirror:
            mirror.service.watch.stop()
        await until(lambda: not self.busy)
        await self._stack.aclose()


@dataclass
class Address:
    """One address for all replicas: each request goes to the next one that is there."""

    replicas: list[Process]
    _asked: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        present = [one for one in self.replicas if one.mirror]
        self._asked += 1
        replica = present[self._asked % len(present)]
        assert replica.mirror
        replica.busy += 1
        try:
            await replica.mirror.service.api(scope, receive, send)
        finally:
            replica.busy -= 1


async def statuses(port: int, grants: Sequence[str]) -> set[str]:
    """What the data plane at this port answers to each grant, over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = set()
    try:
        for grant in grants:
            head = (
                f"HEAD /chunks/{digest_of(CONTENT)} HTTP/1.1\r\nHost: mirror\r\nAuthorization: Bearer {grant}\r\n\r\n"
            )
            writer.write(head.encode())
            found.add((await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0].decode())
    finally:
        writer.close()
    return found


async def staged(agent: Agent, job: str, grant: str) -> dict[str, bytes]:
    stage = await agent.stages.finish((await agent.stages.start(job, grant)).record.id)
    return tree(Path(str(stage.mounts[0].path)))


async def test_no_grant_is_refused_by_any_process_while_keys_are_changed(
    upstreams: None, hub: Hub, postgres_url: str, tmp_path: Path
) -> None:
    hub.repo("org/model").commit({"w.bin": CONTENT})
    old, new, keys = new_signing_key(), new_signing_key(), tmp_path / "keys.pem"
    write_keys(keys, old)
    shared: dict[str, Any] = {"database_url": postgres_url, "store": f"file://{tmp_path}/store", "grant_key_file": keys}
    shared |= {"auth": "token", "token": TOKEN, "bearer": TOKEN, "scrub_seconds": 0, "jobs": MIRRORS}

    def process(name: str, *, is_worker: bool) -> Process:
        return Process(lambda: mirror_under_test(tmp_path / name, serve=not is_worker, work=is_worker, **shared))

    replicas = [process(name, is_worker=False) for name in "ab"]
    worker, address = process("worker", is_worker=True), Address(replicas)
    listener = bind_tcp("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    given: dict[str, Any] = {"url": url, "token": TOKEN, "auth": "token", "data_port": 0, "exposure": "none"}
    async with AsyncExitStack() as stack:
        for one in (*replicas, worker):
            stack.push_async_callback(one.stop)
            await one.restart()
        await stack.enter_async_context(serving(address, listener))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=120)
        )
        bodies = [{"weights": [source("hf://org/model", f"/m/{number}")]} for number in range(MIRRORS)]
        for begun in [(await http.post("/mirror", json=body)).json() for body in bodies]:
            ended = (await http.get(f"/mirror/{begun['id']}", params={"wait": 20})).json()
            assert ended["status"] == "READY", ended
        agent = await stack.enter_async_context(open_agent(load_settings(data_dir=tmp_path / "node", **given)))

        async def use(grants: Sequence[str]) -> None:
            for replica in replicas:
                assert replica.mirror
                assert await statuses(replica.mirror.service.data_port or 0, grants) == {"HTTP/1.1 200 OK"}
            for grant in grants:
                await agent.trust.check(grant)

        async def round_of(change: Awaitable[None] | None) -> list[str]:
            """Grants of before and after a change, used after it."""
            grants: list[str] = []
            for number in range(PAGES):
                page = (await http.get("/mirror", params={"limit": MIRRORS})).json()
                grants += [mirror["grant"] for mirror in page["items"]]
                if change and number == PAGES // 2:
                    await change
            await use(grants)
            return grants

        first = await round_of(None)
        assert await staged(agent, "before", first[0]) == {"w.bin": CONTENT}
        count = len(first)
        for content in ((old, new), (new, old)):
            write_keys(keys, *content)
            for one in (*replicas, worker):
                count += len(await round_of(one.restart()))
        assert count == 7 * PAGES * MIRRORS
        await use(first)
        last = await round_of(None)
        assert last[-1].split(".")[0] != first[0].split(".")[0]  # another key has signed it
        assert await staged(agent, "after", last[-1]) == {"w.bin": CONTENT}

        # What the worker signs for repairs is accepted as well: the hub is not asked for what the agent holds.
        await agent.heartbeats.beat()
        hub.log.clear()
        rot(tmp_path / "store/chunks" / digest_of(CONTENT).fanout, "flipped")
        found = (await http.post("/verifications", params={"wait": 20}, json={"all": True, "tier": "mirror"})).json()
        assert [item["outcome"] for item in found["items"]] == ["repaired"], found
        assert hub.log.find("/resolve") == []
