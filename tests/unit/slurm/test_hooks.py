"""Prolog and epilog on one node, with a mirror and an agent in memory."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bdn.client.services import Services
from bdn.core.errors import MountFailedError
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.client import OutageRetry
from bdn.slurm.hooks import Hooks, Outages
from bdn.slurm.job_folder import JobFolders, SlurmJob
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody, MirrorSource, MirrorStatus
from bdn.wire.shapes import ErrorBody, Items
from bdn.wire.stage_schema import StageDocument, StageRequest

JOB = SlurmJob(id=7, restarts=0, uid=os.getuid(), gid=os.getgid(), nodes=2, comment="bdn:hf://org/model")
BEGAN = datetime(2026, 11, 29, tzinfo=UTC)


class Mirrors(MirrorClient):
    """Each request makes a mirror, READY at once, of another commit: the branch moves all the time."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.made: list[Mirror] = []
        self.status: MirrorStatus = "READY"
        self.opened_by: list[str | None] = []

    async def request(self, body: MirrorRequestBody) -> Mirror:
        number = len(self.made)
        self.opened_by = [one.auth_secret_name for one in body.weights or ()]
        sources = [
            MirrorSource(source=one.source, mount_location=one.mount_location or "", status=self.status)
            for one in body.weights or ()
        ]
        error = ErrorBody(code="GATED_SOURCE", message="accept the terms", retryable=False, details={})
        made = Mirror(
            id=f"mir_{number:024}",
            status=self.status,
            created_at=BEGAN + timedelta(seconds=number),
            grant=f"grant-{number}",
            error=error if self.status == "FAILED" else None,
            sources=sources,
        )
        self.made.append(made)
        return made

    async def mirror(self, mirror_id: str, wait_seconds: float = 0, mount: str | None = None) -> Mirror:
        return next(one for one in self.made if one.id == mirror_id)

    async def mirrors(
        self, status: MirrorStatus | None = None, source: str | None = None, limit: int = 100
    ) -> list[Mirror]:
        return [one for one in reversed(self.made) if source in {None, one.sources[0].source}][:limit]


class Agent(AgentClient):
    """Stages at once; ``stuck`` stages cannot be released."""

    def __init__(self, mirrors: Mirrors) -> None:
        super().__init__("http://127.0.0.1:1")
        self.known: dict[str, StageDocument] = {}
        self.grants: list[str] = []
        self.stuck: set[str] = set()
        self.mirrors = mirrors

    async def stage(self, request: StageRequest) -> StageDocument:
        self.grants.append(request.grant)
        (mount,) = (one.sources[0].mount_location for one in self.mirrors.made if one.grant == request.grant)
        number = f"stg_{len(self.known):024}"
        self.known[number] = stage(number, request.job_id, mount)
        return self.known[number]

    async def follow(
        self, stage_id: str, interval_seconds: float = 0.5, outages: OutageRetry | None = None
    ) -> AsyncIterator[StageDocument]:
        yield self.known[stage_id]

    async def stages(self) -> Items[StageDocument]:
        return Items[StageDocument](items=list(self.known.values()))

    async def unstage(self, stage_id: str) -> StageDocument:
        if stage_id in self.stuck:
            raise MountFailedError("/mounts", "busy")
        return self.known.pop(stage_id)

    async def ready(self) -> bool:
        return True


def stage(number: str, job_id: str, mount_location: str = "/m") -> StageDocument:
    mount: dict[str, Any] = {
        "mount_location": mount_location,
        "path": "/mounts/BDN_WEIGHTS",
        "manifest": f"b3:{'0' * 64}",
        "source": "hf://org/model",
        "bytes_from": {"node": 0, "cluster": 0, "mirror": 0},
    }
    shown = {"id": number, "job_id": job_id, "state": "READY", "created_at": BEGAN, "mounts": [mount]}
    return StageDocument.model_validate(shown)


async def never(_: int) -> bool:
    return False


class Node:
    def __init__(self, jobs: Path, mirrors: Mirrors) -> None:
        self.jobs = jobs
        self.agent = Agent(mirrors)
        self.mirrors = mirrors
        outages = Outages()
        self.hooks = Hooks(Services(mirrors, self.agent, outages.retry), JobFolders(jobs), never, outages)

    def left(self, name: str) -> str:
        return (self.jobs / "7" / name).read_text()


@pytest.fixture
def mirrors() -> Mirrors:
    return Mirrors()


@pytest.fixture
def node(tmp_path: Path, mirrors: Mirrors) -> Node:
    return Node(tmp_path / "jobs", mirrors)


async def test_prolog__of_a_job_of_two_nodes__stages_the_same_mirror_on_both(
    tmp_path: Path, node: Node, mirrors: Mirrors
) -> None:
    other = Node(tmp_path / "other", mirrors)
    assert await node.hooks.prolog(JOB, 60) == 0
    assert await other.hooks.prolog(JOB, 60) == 0
    assert (node.agent.grants, other.agent.grants, len(mirrors.made)) == (["grant-0"], ["grant-0"], 2)
    assert node.left("environment") == other.left("environment") == "BDN_WEIGHTS=/mounts/BDN_WEIGHTS\n"
    assert (node.jobs / "7/environment").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("later", [replace(JOB, restarts=1), replace(JOB, id=8), replace(JOB, nodes=1)])
async def test_prolog__of_another_start_or_job__stages_a_mirror_of_its_own(node: Node, later: SlurmJob) -> None:
    """A job of one node needs no agreement."""
    for job in (JOB, later):
        assert await node.hooks.prolog(job, 60) == 0
    assert node.agent.grants == ["grant-0", "grant-1"]
    assert node.mirrors.opened_by == [None]


async def test_prolog__whose_mirror_fails__leaves_a_sentence_and_the_other_node_requests_its_own(
    node: Node, mirrors: Mirrors
) -> None:
    mirrors.status = "FAILED"
    assert await node.hooks.prolog(JOB, 60) == 0
    assert node.left("error") == "bdn: accept the terms [GATED_SOURCE]\n"
    mirrors.status = "READY"
    assert await node.hooks.prolog(JOB, 60) == 0
    assert node.agent.grants == ["grant-1"]
    assert not (node.jobs / "7/error").exists()


async def test_epilog__releases_stages_of_its_job_and_of_jobs_that_are_gone_alone(node: Node) -> None:
    await node.hooks.prolog(JOB, 60)
    (node.jobs / "9").mkdir()
    others = ("slurm-8", "slurm-9", "train-7", "slurm-x", "pull:1", "slurm-\u0667")
    node.agent.known |= {name: stage(name, name) for name in others}
    node.agent.known["failed"] = stage("failed", "slurm-8").model_copy(update={"state": "FAILED"})
    await node.hooks.epilog(JOB)
    assert set(node.agent.known) == {"slurm-9", "train-7", "slurm-x", "pull:1", "slurm-\u0667", "failed"}
    assert not (node.jobs / "7").exists()


async def test_epilog__that_cannot_release_a_stage__releases_the_others_and_the_next_one_tries_again(
    node: Node,
) -> None:
    node.agent.known = {name: stage(name, name) for name in ("slurm-5", "slurm-6")}
    node.agent.stuck = {"slurm-5"}
    await node.hooks.epilog(JOB)
    assert set(node.agent.known) == {"slurm-5"}
    node.agent.stuck = set()
    await node.hooks.epilog(JOB)
    assert not node.agent.known


async def test_prolog__of_a_comment_with_a_secret__requests_its_sources_with_it_if_it_is_permitted(node: Node) -> None:
    job = replace(JOB, comment="bdn:secret=hub hf://org/model")
    assert await node.hooks.prolog(job, 60) == 0
    assert "may not name the secret 'hub'" in node.left("error")
    assert not node.mirrors.made
    assert await replace(node.hooks, secrets=frozenset({"hub"})).prolog(job, 60) == 0
    assert node.mirrors.opened_by == ["hub"]
