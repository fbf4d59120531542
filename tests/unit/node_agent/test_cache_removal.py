"""A mount on one node and the removal of the deleted project on another: in every order of their steps no job loses its cache."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.core.errors import GrantInvalidError
from bdn.wire.cache_schema import RemoveCacheCommand
from bdn.wire.grants import CacheGrant
from bdn.wire.heartbeat_schema import Report
from bdn.wire.job_schema import CacheFolders
from bdn.wire.shapes import Items
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume
from node_agent.job.shared_caches import SharedCaches
from tests.support.network.loops import run_hurried

PROJECT: Final = "p" * 10
MOUNT: Final = ("record", "open")
REMOVAL: Final = ("mark", "ask", "rename")
ORDERS: Final = [
    order
    for order in permutations(MOUNT + REMOVAL)
    if all(tuple(one for one in order if one in steps) == steps for steps in (MOUNT, REMOVAL))
]


@dataclass
class Gate:
    """A task waits here for its next step."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def pass_through(self) -> None:
        self.reached.set()
        await self.opened.wait()


@dataclass
class Mirror:
    """What each node has mounted, as it reported last."""

    gates: dict[str, Gate] = field(default_factory=lambda: {step: Gate() for step in ("open", "ask", "rename")})
    mounts: dict[str, list[str]] = field(default_factory=dict)
    answers: list[list[str]] = field(default_factory=list)

    def record(self, node: str, caches: SharedCaches) -> None:
        self.mounts[node] = [f"{holder} on {node}" for use in caches.mounted() for holder in use.holders]

    async def project_uses(self, _: str) -> Items[str]:
        await self.gates["ask"].pass_through()
        self.answers.append([use for node in self.mounts.values() for use in node])
        await self.gates["rename"].pass_through()
        return Items[str](items=self.answers[-1])


@asynccontextmanager
async def a_node(name: str, root: Path, mirror: Mirror) -> AsyncIterator[SharedCaches]:
    volume = CacheVolume(root, Trash(root / ".trash"))
    grant = CacheGrant("org", PROJECT, "t" * 10, "east", volume.id(), 0.0)
    client: Any = mirror
    clock = asyncio.get_running_loop().time

    async def verify(_: str) -> CacheGrant:
        return grant

    async def report() -> None:
        mirror.record(name, caches)
        await mirror.gates["open"].pass_through()

    def on_release() -> None:
        asyncio.get_running_loop().call_soon(mirror.record, name, caches)

    with SharedCaches(
        volume, "east", client, verify, elapsed=clock, clock=clock, report=report, on_release=on_release
    ) as caches:
        yield caches


async def in_order(order: tuple[str, ...], root: Path) -> None:
    mirror, reports = Mirror(), list[Report]()
    async with a_node("n1", root, mirror) as one, a_node("n2", root, mirror) as two:
        before = CacheGrant("org", PROJECT, "t" * 10, "east", one.volume.id(), 0.0)
        project = Path(two.volume.open(before, huggingface=False).project)
        (project / "x").write_bytes(b"of an earlier job")
        command = RemoveCacheCommand(id="cac_1", organisation="org", project=PROJECT, volume_id=before.volume)
        mounting: asyncio.Task[CacheFolders] | None = None
        removing: asyncio.Task[None] | None = None
        for step in order:
            match step:
                case "record":
                    mounting = asyncio.create_task(one.mount("token", "jv_1", huggingface=False))
                    await mirror.gates["open"].reached.wait()
                case "open":
                    assert mounting is not None
                    mirror.gates["open"].opened.set()
                    await asyncio.wait([mounting])
                case "mark":
                    removing = asyncio.create_task(two.run(command, reports.append))
                    await mirror.gates["ask"].reached.wait()
                case "ask":
                    mirror.gates["ask"].opened.set()
                    await mirror.gates["rename"].reached.wait()
                case _:
                    assert removing is not None
                    mirror.gates["rename"].opened.set()
                    if not mirror.answers[0]:
                        await removing
        assert mounting is not None
        assert removing is not None

        if order.index("open") < order.index("mark"):
            assert Path(mounting.result().project) == project
            await asyncio.sleep(3600)
            assert (project / "x").read_bytes() == b"of an earlier job"
            assert mirror.answers[-1] == ["jv_1 on n1"]
            one.release("jv_1")
        else:
            with pytest.raises(GrantInvalidError, match="was deleted"):
                mounting.result()
        await removing
        assert [report.remove_cache is not None for report in reports] == [True]
        assert [path.name for path in project.parents[1].iterdir()] == [f"{PROJECT}.gone"]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_mount_and_removal_on_two_nodes__in_every_order__the_mount_is_refused_or_waited_for(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    run_hurried(in_order(order, tmp_path / "volumes"))


def test_every_order_of_the_steps_is_tried() -> None:
    assert len(set(ORDERS)) == 10
