"""Training caches on a node: who may open them, when they are measured, and when they are removed. Hours cost nothing here."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from bdn.core.errors import (
    BdnError,
    CacheNotSharedError,
    GrantInvalidError,
    InUseError,
    LimitExceededError,
    NotFoundError,
    StoreUnavailableError,
)
from bdn.core.training.cache_summary import CacheSummary, SummaryEntry
from bdn.wire.cache_schema import CacheSummaryBody, RemovalRequest, RemoveCacheCommand, unpack
from bdn.wire.grants import CacheGrant
from bdn.wire.heartbeat_schema import Report
from bdn.wire.shapes import Items
from node_agent.disk.trash import Trash
from node_agent.job.cache_volume import CacheVolume
from node_agent.job.shared_caches import SharedCaches
from tests.support.network.loops import run_hurried

PROJECT = "p" * 10
GRANT = CacheGrant("org", PROJECT, "t" * 10, "east", "", 0.0)
HOUR = 3600.0


@dataclass
class Told:
    """The mirror, as far as an agent tells it of caches: what, and when. It takes ``most`` characters at once."""

    at: list[float] = field(default_factory=list)
    bodies: list[CacheSummaryBody] = field(default_factory=list)
    failures: list[BdnError] = field(default_factory=list)
    mounted: list[object] = field(default_factory=list)  # each time that the agent reported
    uses: list[str] = field(default_factory=list)  # of the project, on any node
    silence: BdnError | None = None  # instead of an answer
    released: int = 0
    most: int = 10**9

    async def project_uses(self, project: str) -> Items[str]:
        assert project == PROJECT
        if self.silence is not None:
            raise self.silence
        return Items[str](items=self.uses)

    async def record_cache_summary(self, project: str, cluster: str, body: CacheSummaryBody) -> None:
        assert (project, cluster) == (PROJECT, "east")
        self.at.append(asyncio.get_running_loop().time())
        if self.failures:
            raise self.failures.pop(0)
        if len(body.packed) > self.most:
            raise LimitExceededError("bytes of a request", len(body.packed), self.most)
        self.bodies.append(body)


@dataclass
class Node:
    caches: SharedCaches
    told: Told

    async def opened(self, cluster: str = "east") -> Path:
        known = await self.caches.document()
        self.grant = replace(GRANT, volume=known.volume_id, cluster=cluster)
        grant = await self.caches.granted("token")
        return Path(self.caches.volume.open(grant, huggingface=False).project)

    grant: CacheGrant = GRANT


@asynccontextmanager
async def a_node(root: Path) -> AsyncIterator[Node]:
    """One that works."""
    told = Told()

    async def verify(_: str) -> CacheGrant:
        return node.grant

    volume = CacheVolume(root / "volumes", Trash(root / "volumes/.trash"))
    client: Any = told
    clock = asyncio.get_running_loop().time

    async def report() -> None:
        if told.silence is not None:
            raise told.silence
        told.mounted.append([(use.project, use.holders) for use in node.caches.mounted()])

    def on_release() -> None:
        told.released += 1

    with SharedCaches(
        volume, "east", client, verify, elapsed=clock, clock=clock, report=report, on_release=on_release
    ) as caches:
        node = Node(caches, told)
        keeping = asyncio.create_task(caches.keep())
        try:
            yield node
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping


def on_a_node(root: Path, life: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with a_node(root) as node:
            await life(node)

    run_hurried(run())


def test_a_cache_is_measured_every_ten_minutes_of_its_use_and_once_after_it(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        project = await node.opened()
        node.caches.hold(PROJECT, "job 1")
        (project / "x").write_bytes(b"12345")
        await asyncio.sleep(1500)
        node.caches.hold(PROJECT, "job 2")
        node.caches.release("job 1")
        await asyncio.sleep(100)
        (project / "y").write_bytes(b"1")
        node.caches.release("job 2")
        await asyncio.sleep(HOUR)
        assert [round(at) for at in node.told.at] == [600, 1200, 1600]
        assert [body.size_bytes for body in node.told.bodies] == [5, 5, 6]
        assert [one.path for one in unpack(node.told.bodies[-1].packed)] == [
            "user_artifacts",
            "user_artifacts/x",
            "user_artifacts/y",
        ]
        assert (await node.caches.document()).items == []

    on_a_node(tmp_path, life)


def test_a_summary_that_the_mirror_does_not_take_is_told_again_until_the_project_is_gone(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        await node.opened()
        node.told.failures = [StoreUnavailableError("away"), StoreUnavailableError("away"), NotFoundError("it")]
        node.caches.hold(PROJECT, "job")
        node.caches.release("job")
        await asyncio.sleep(HOUR)
        assert [round(at) for at in node.told.at] == [0, 60, 120]
        assert node.told.bodies == []

    on_a_node(tmp_path, life)


def test_a_mirror_that_takes_less_at_once_is_told_fewer_entries(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        project = await node.opened()
        for number in range(300):
            (project / f"{number}").write_bytes(os.urandom(1))
        node.told.most = 1000
        summary = await node.caches.capture(PROJECT)
        (body,) = node.told.bodies
        assert [one.path for one in unpack(body.packed)] == ["user_artifacts"]
        assert [(one.path, one.size_bytes) for one in summary.file_summaries] == [("user_artifacts", 300)]
        assert (body.size_bytes, body.files) == (300, 300)

    on_a_node(tmp_path, life)


def test_what_is_larger_than_any_number_is_told_as_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def summarized(*_: object) -> CacheSummary:
        summary = CacheSummary()
        for name in "ab":  # files with holes, as large as a file system allows
            summary.add(SummaryEntry(name, 2**63 - 1, 1e300, 0o100644))
        return summary

    async def life(node: Node) -> None:
        await node.opened()
        await node.caches.capture(PROJECT)
        assert node.told.bodies[0].size_bytes == 2**63 - 1

    monkeypatch.setattr("node_agent.job.shared_caches.summarized", summarized)
    on_a_node(tmp_path, life)


def test_a_grant_of_another_cluster_or_volume_opens_nothing(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        with pytest.raises(GrantInvalidError, match="cluster west"):
            await node.opened(cluster="west")
        node.grant = replace(GRANT, volume="0" * 32)
        with pytest.raises(CacheNotSharedError):
            await node.caches.granted("token")
        assert [path.name for path in node.caches.volume.root.iterdir()] == ["volume_id"]

    on_a_node(tmp_path, life)


def test_what_any_node_uses_is_removed_by_force_alone(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        project = await node.opened()
        for name in "wxyz":
            (project / name).write_bytes(b"")

        async def remove(name: str, *, force: bool = False) -> list[str]:
            await node.caches.remove(RemovalRequest(project=PROJECT, path=f"user_artifacts/{name}", force=force))
            return sorted(path.name for path in project.iterdir())

        node.told.uses = ["jv_1 on another node"]
        with pytest.raises(InUseError, match="jv_1 on another node"):
            await remove("w")
        assert await remove("w", force=True) == ["x", "y", "z"]
        node.told.uses, node.told.silence = [], StoreUnavailableError("away")
        with pytest.raises(StoreUnavailableError):
            await remove("x")
        assert await remove("x", force=True) == ["y", "z"]
        node.told.silence = None
        node.caches.hold(PROJECT, "job")
        node.caches.release("job")
        assert await remove("y") == ["z"]
        assert node.told.mounted[-1] == []  # before the mirror was asked: it knew of the job

    on_a_node(tmp_path, life)


def test_a_deleted_projects_cache_goes_once_it_is_unused_and_its_volume_and_the_mirror_are_there(
    tmp_path: Path,
) -> None:
    async def life(node: Node) -> None:
        project = await node.opened()
        (project / "x").write_bytes(b"")
        id_file = node.caches.volume.root / "volume_id"
        command = RemoveCacheCommand(id="cac_1", organisation="org", project=PROJECT, volume_id=node.grant.volume)
        reports: list[Report] = []
        node.told.uses = ["jv_1 on n2"]
        running = asyncio.create_task(node.caches.run(command, reports.append))
        await asyncio.sleep(HOUR)
        assert project.exists()
        content = id_file.read_bytes()
        id_file.unlink()  # as if it were not mounted
        node.told.uses = []
        await asyncio.sleep(HOUR)
        assert project.exists()
        id_file.write_bytes(content)
        node.told.silence = StoreUnavailableError("away")
        await asyncio.sleep(HOUR)
        assert project.exists()
        assert reports == []
        node.told.silence = None
        await running
        assert not project.parent.exists()
        (report,) = reports
        assert cast("Any", report.remove_cache).removed
        await node.caches.run(command, reports.append)  # another node was asked, too
        assert not cast("Any", reports[-1].remove_cache).removed

    on_a_node(tmp_path, life)


def test_the_volumes_id_is_known_soon_after_another_node_wrote_it(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        await asyncio.sleep(100)
        assert node.caches.volume_id is None
        assert not node.caches.volume.root.exists()
        name = CacheVolume(node.caches.volume.root, node.caches.volume.trash).id()
        await asyncio.sleep(100)
        assert node.caches.volume_id == name

    on_a_node(tmp_path, life)


def test_a_mount_is_reported_before_the_job_has_it_and_a_release_after_it(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        await node.opened()
        await node.caches.mount("token", "jv_2", huggingface=False)
        await node.caches.mount("token", "jv_1", huggingface=False)
        assert node.told.mounted == [[(PROJECT, ["jv_2"])], [(PROJECT, ["jv_1", "jv_2"])]]
        node.caches.release("jv_1")
        assert [use.holders for use in node.caches.mounted()] == [["jv_2"]]
        node.caches.release("jv_2")
        assert (node.caches.mounted(), node.told.released) == ([], 2)

    on_a_node(tmp_path, life)


def test_a_mount_that_the_mirror_does_not_record_opens_nothing(tmp_path: Path) -> None:
    async def life(node: Node) -> None:
        node.grant = replace(GRANT, volume=(await node.caches.document()).volume_id)
        node.told.silence = StoreUnavailableError("away")
        with pytest.raises(StoreUnavailableError):
            await node.caches.mount("token", "jv_1", huggingface=False)
        assert [path.name for path in node.caches.volume.root.iterdir()] == ["volume_id"]
        assert node.caches.mounted() == []

    on_a_node(tmp_path, life)
