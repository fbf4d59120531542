"""``bdn demo``: the main job on real bytes with no network, step by step, and one table."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click

from bdn.cli.demo_bucket import BUCKET, HOST, KEY_ID, fill_bucket, s3_server
from bdn.cli.demo_model import SHARDS, make_model
from bdn.cli.demo_table import Step, Steps, print_table
from bdn.cli.embedding import running_services
from bdn.cli.output import Output, command_line
from bdn.cli.progress import progress_bar
from bdn.cli.services import request_body
from bdn.cli.stage import grant_of, stage_bytes
from bdn.core.errors import InternalError
from bdn.core.units import format_size
from bdn.mirror.settings import MirrorSettings
from bdn.net.client.mirror_client import AgentClient, MirrorClient
from bdn.wire.errors import ReportedError
from bdn.wire.mirror_schema import Mirror
from bdn.wire.operation_schema import Eviction, EvictionRequest
from bdn.wire.stage_schema import StageDocument, StageRequest

_WAIT_SECONDS = 60.0


@dataclass
class Demo:
    """The steps, against running services."""

    output: Output
    mirrors: MirrorClient
    agent: AgentClient
    steps: list[Step] = field(default_factory=list)

    async def run(self) -> None:
        """Mirror, stage cold, stage warm, fail to evict what is in use, evict, stage again."""
        mirror = await self.mirror("mirror the source")
        cold = await self.stage("cold stage", mirror, "job-1")
        warm = await self.stage("node hit", mirror, "job-2")
        await self.evict("evict while in use", expected="REFUSED")
        for stage in (cold, warm):
            await self.agent.unstage(stage.id)
        await self.evict("evict", expected="DONE")
        again = await self.stage("stage again", mirror, "job-3")
        self.check(again)

    async def mirror(self, title: str) -> Mirror:
        """Pull the source into the mirror's store."""
        began = time.perf_counter()
        body = request_body((f"s3://{BUCKET}/model",), ("/models/demo",))
        mirror = await self.mirrors.request(body)
        with progress_bar(self.output, title) as bar:
            async for latest in self.mirrors.follow(mirror.id):
                mirror = latest
                bar.update(mirror.bytes_transferred + mirror.bytes_reused, mirror.bytes_total)
        if mirror.error is not None:
            raise ReportedError(mirror.error)
        seconds = time.perf_counter() - began
        outcome = f"{mirror.files_total} files in the store"
        self.note(
            Step(
                step=title,
                outcome=outcome,
                upstream=mirror.bytes_transferred,
                seconds=seconds,
                bytes=mirror.bytes_total or 0,
            )
        )
        return mirror

    async def stage(self, title: str, mirror: Mirror, job_id: str) -> StageDocument:
        """Make the files stand for a job."""
        began = time.perf_counter()
        stage = await self.agent.stage(StageRequest(job_id=job_id, grant=grant_of(mirror)))
        with progress_bar(self.output, title) as bar:
            async for latest in self.agent.follow(stage.id, 0.2):
                stage = latest
                bar.update(sum(mount.bytes_done for mount in stage.mounts), stage_bytes(stage))
        if stage.state != "READY":
            raise ReportedError(stage.error) if stage.error else InternalError(f"stage {stage.id} is {stage.state}")
        seconds = time.perf_counter() - began
        mount = stage.mounts[0]
        outcome = f"{mount.files_total} files, {mount.view}, {mount.exposure}"
        self.note(
            Step(step=title, outcome=outcome, tiers=mount.bytes_from, seconds=seconds, bytes=mount.bytes_total or 0)
        )
        return stage

    async def evict(self, title: str, *, expected: str) -> Eviction:
        """Take the source out of this node's cache."""
        began = time.perf_counter()
        request = EvictionRequest(source=f"s3://{BUCKET}/model", tier="node")
        eviction = await self.mirrors.evict(request, _WAIT_SECONDS)
        if eviction.status != expected:
            raise InternalError(f"the eviction is {eviction.status}, not {expected}")
        seconds = time.perf_counter() - began
        holders = [holder for item in eviction.items for holder in item.holders]
        outcome = f"refused: in use by {len(holders)} jobs" if holders else f"{format_size(eviction.bytes_freed)} freed"
        self.note(Step(step=title, outcome=outcome, seconds=seconds))
        return eviction

    def check(self, stage: StageDocument) -> None:
        """Open every staged shard as a user's code would."""
        from safetensors import safe_open  # noqa: PLC0415 - an extra that only the demo needs

        began = time.perf_counter()
        shards = sorted(Path(stage.mounts[0].path).glob("*.safetensors"))
        tensors = 0
        for shard in shards:
            with safe_open(shard, framework="np") as weights:
                tensors += sum(weights.get_tensor(name).size > 0 for name in weights.keys())  # noqa: SIM118 - not a dict
        if tensors != SHARDS:
            raise InternalError(f"{tensors} of {SHARDS} tensors could be read")
        self.note(Step(step="read with safetensors", outcome=f"{tensors} tensors", seconds=time.perf_counter() - began))

    def note(self, step: Step) -> None:
        """Remember a finished step."""
        self.steps.append(step)


@click.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Work in this new directory and leave it behind.")
@command_line
async def demo(output: Output, *, keep: Path | None) -> None:
    """Show the main job on real bytes, without a network: 1.1 GB of safetensors, served by a local S3 server.

    They are mirrored, staged cold, staged from the cache, evicted, and staged again.

    \b
    Example: bdn demo
    """
    with tempfile.TemporaryDirectory(prefix="bdn-demo-") as temporary:
        folder = keep or Path(temporary)
        async with _services(output, folder) as (mirrors, agent):
            run = Demo(output, mirrors, agent)
            await run.run()
    if output.as_json:
        output.result(Steps(steps=run.steps), [])
    else:
        print_table(run.steps)


@asynccontextmanager
async def _services(output: Output, folder: Path) -> AsyncIterator[tuple[MirrorClient, AgentClient]]:
    """The upstream with a model in it, a mirror and an agent."""
    async with AsyncExitStack() as stack:
        output.say("making a model repository of safetensors")
        make_model(folder / "model")
        output.say("serving it from a local S3 server")
        url = stack.enter_context(s3_server())
        fill_bucket(url, folder / "model")
        # The process's own environment: the mirror reads it as it would on a laptop.
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": KEY_ID,
            "BDN_EGRESS_ALLOW": HOST,
            "BDN_AGENT_CACHE_DIR": str(folder / "cache"),
            "BDN_AGENT_SOCKET": str(folder / "agent.sock"),
            "BDN_AGENT_DATA_PORT": "0",
        }
        settings = MirrorSettings(
            data_dir=folder / "data", host="127.0.0.1", port=0, data_port=0, auth="off", token=None
        )
        services = await stack.enter_async_context(running_services(settings, program="bdn demo", serve=True))
        mirrors = await stack.enter_async_context(MirrorClient(services.mirror.url))
        agent = await stack.enter_async_context(AgentClient(services.agent.address))
        try:
            yield mirrors, agent
        finally:
            await _unstage_all(agent)


async def _unstage_all(agent: AgentClient) -> None:
    """Nothing stays mounted below a directory that is about to be removed."""
    for stage in (await agent.stages()).items:
        await agent.unstage(stage.id)
