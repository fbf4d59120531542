"""``bdn demo``: the main job on real bytes with no network, step by step, and one table.

The upstream is moto's S3 server in a process of its own, with a model of about 1.1 GB of random weights.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

import click
from pydantic import BaseModel

from bdn.cli.clients import request_body
from bdn.cli.output import Output, command_line, progress_bar
from bdn.cli.running import running_services
from bdn.cli.stage import grant_of, stage_bytes
from bdn.core.errors import InternalError, UpstreamUnavailableError
from bdn.core.units import format_size
from bdn.mirror.settings import MirrorSettings
from bdn.net.api_server import bind_tcp
from bdn.net.client import AgentClient, MirrorClient
from bdn.wire.mirror_schema import Mirror
from bdn.wire.operation_schema import Eviction, EvictionRequest
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import BytesFrom, StageDocument, StageRequest

_WAIT_SECONDS: Final = 60.0
_BUCKET: Final = "demo"
_KEY_ID: Final = "demo"
_START_SECONDS: Final = 60
_HOST: Final = "127.0.0.1"
_SHARDS: Final = 16
_SHARD_BYTES: Final = 64 * 1024 * 1024  # moto reads a whole object for every range, so objects stay small
_SMALL_FILES: Final = 40


class Step(BaseModel):
    """One row: what was done, the bytes that it took from each tier, and how long it took."""

    step: str
    outcome: str
    upstream: int = 0
    tiers: BytesFrom = BytesFrom()
    seconds: float
    bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Gigabytes per second of the step's whole result; None where nothing was delivered."""
        return self.bytes / self.seconds / 1e9 if self.bytes else None


class Steps(BaseModel):
    """The demo's result."""

    steps: list[Step]


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
        body = request_body((f"s3://{_BUCKET}/model",), ("/models/demo",))
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
        request = EvictionRequest(source=f"s3://{_BUCKET}/model", tier="node")
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
        if tensors != _SHARDS:
            raise InternalError(f"{tensors} of {_SHARDS} tensors could be read")
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
        _print_table(run.steps)


@asynccontextmanager
async def _services(output: Output, folder: Path) -> AsyncIterator[tuple[MirrorClient, AgentClient]]:
    """The upstream with a model in it, a mirror and an agent."""
    async with AsyncExitStack() as stack:
        output.say("making a model repository of safetensors")
        _make_model(folder / "model")
        output.say("serving it from a local S3 server")
        url = stack.enter_context(_s3_server())
        _fill_bucket(url, folder / "model")
        # The process's own environment: the mirror reads it as it would on a laptop.
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_ACCESS_KEY_ID": _KEY_ID,
            "AWS_SECRET_ACCESS_KEY": _KEY_ID,
            "BDN_EGRESS_ALLOW": _HOST,
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


# --- the model, and the server that it comes from ---


def _make_model(folder: Path) -> None:
    """Write the repository below ``folder``."""
    import numpy as np  # noqa: PLC0415 - an extra that only the demo needs
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng()
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(_SHARDS):
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        tensor = f"model.layers.{number}.mlp.weight"
        weights = np.frombuffer(random.bytes(_SHARD_BYTES), dtype=np.float16).reshape(-1, 4096)
        save_file({tensor: weights}, folder / name, {"format": "pt"})
        weight_map[tensor] = name
    _write(folder / "config.json", {"architectures": ["DemoForCausalLM"], "num_hidden_layers": _SHARDS})
    _write(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    _write(
        folder / "tokenizer" / "tokenizer.json", {"model": {"type": "BPE", "vocab": {f"t{n}": n for n in range(5000)}}}
    )
    (folder / "README.md").write_text("# A model that was made for the demo of BDN\n")
    (folder / "tokenizer" / "added_tokens.json").touch()
    for number in range(_SMALL_FILES):
        _write(folder / "eval" / f"task {number % 4}" / f"results-{number}.json", {"task": number, "score": number / 7})


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


@contextmanager
def _s3_server() -> Iterator[str]:
    """The server's address, until the block ends."""
    with bind_tcp(_HOST, 0) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # noqa: S603
        try:
            _wait_for(process, port)
            yield f"http://{_HOST}:{port}"
        finally:
            process.terminate()


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(_HOST, port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/moto-api/")
            connection.getresponse().read()
            return
        time.sleep(0.05)
    raise UpstreamUnavailableError("the demo's S3 server", "it did not start; is the extra bdn[demo] installed?")


def _fill_bucket(url: str, folder: Path) -> None:
    """Put every file of ``folder`` below the prefix ``model/``."""
    netloc = url.removeprefix("http://")
    _put(netloc, f"/{_BUCKET}", None)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(2) as threads:
        list(
            threads.map(
                lambda path: _put(netloc, f"/{_BUCKET}/model/{quote(str(path.relative_to(folder)))}", path), files
            )
        )


def _put(netloc: str, target: str, path: Path | None) -> None:
    """A plain PUT: moto takes any signature, so none is computed."""
    headers = {
        "Authorization": f"AWS4-HMAC-SHA256 Credential={_KEY_ID}/20260101/us-east-1/s3/aws4_request, "
        "SignedHeaders=host, Signature=0",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
    }
    connection = http.client.HTTPConnection(netloc, timeout=120)
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        body = stack.enter_context(path.open("rb")) if path else None
        length = path.stat().st_size if path else 0
        connection.request("PUT", target, body=body, headers={**headers, "Content-Length": str(length)})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise UpstreamUnavailableError("the demo's S3 server", f"status {response.status}: {answer[:200]!r}")


def _print_table(steps: Sequence[Step]) -> None:
    """On standard output."""
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="bdn demo: bytes by tier")
    for heading in ("step", "result"):
        table.add_column(heading)
    for heading in ("upstream", "mirror", "cluster", "node", "seconds", "GB/s"):
        table.add_column(heading, justify="right")
    for step in steps:
        bytes_by_tier = (step.upstream, step.tiers.mirror, step.tiers.cluster, step.tiers.node)
        sizes = [format_size(size) if size else "-" for size in bytes_by_tier]
        rate = "-" if step.rate is None else f"{step.rate:.2f}"
        table.add_row(step.step, step.outcome, *sizes, f"{step.seconds:.3f}", rate)
    Console(width=None if Console().is_terminal else 120).print(table)
