"""``make demo``: the main workflow on real bytes without a network, step by step, with one table of results.

The upstream is moto's S3 server in a separate process, with a model of random weights, 1.1 GB unless an option says otherwise.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
import httpx2
from pydantic import BaseModel

from bdn.cli.clients import agent_client, mirror_client
from bdn.cli.output import Output, command_line, progress_bars, table
from bdn.core.errors import InternalError, UpstreamUnavailableError
from bdn.core.units import counted, format_size
from bdn.local.services import embedded_services
from bdn.net.waiting import grant_of, last_mirror, last_stage, ready_mirror, ready_stage
from bdn.wire.named_sources import request_body
from bdn.wire.operation_schema import EvictionRequest
from bdn.wire.stage_schema import BytesFrom, StageDocument, StageRequest

_WAIT_SECONDS: Final = 60.0
_BUCKET: Final = "demo"
_SOURCE: Final = f"s3://{_BUCKET}/model"
_KEY_ID: Final = "demo"
_START_SECONDS: Final = 60
_HOST: Final = "127.0.0.1"
_SHARDS: Final = 16
_SHARD_MIB: Final = 64  # moto reads a whole object for every range, so objects stay small
_SMALL_FILES: Final = 40


class Step(BaseModel):
    """One row: the step, the bytes read from each tier, the duration, and the bytes of the result."""

    step: str
    outcome: str
    upstream: int = 0
    tiers: BytesFrom = BytesFrom()
    seconds: float
    bytes: int = 0


@dataclass
class _Demo:
    """Each step calls the mirror and the agent as the commands do, at the addresses in the environment."""

    output: Output
    steps: list[Step] = field(default_factory=list)

    async def run(self) -> None:
        """Mirror, stage cold, stage warm, fail to evict a source in use, evict, stage again, and read."""
        grant = await self.mirror("mirror the source")
        stages = [await self.stage("cold stage", grant, "job-1"), await self.stage("node hit", grant, "job-2")]
        await self.evict("evict while in use", expected="REFUSED")
        await _unstage(stages)
        await self.evict("evict", expected="DONE")
        self.read(await self.stage("stage again", grant, "job-3"))

    async def mirror(self, title: str) -> str:
        """Copy the source into the mirror's store; returns a grant."""
        async with mirror_client() as client:
            began = time.perf_counter()
            begun = await client.request(request_body((_SOURCE,), ("/models/demo",)))
            with progress_bars(self.output) as report:
                mirror = ready_mirror(await last_mirror(client.follow(begun.id), report))
        size, came = mirror.bytes_total or 0, mirror.bytes_transferred
        self.note(title, f"{counted(mirror.files_total, 'file')} in the store", began, upstream=came, bytes=size)
        return grant_of(mirror)

    async def stage(self, title: str, grant: str, job_id: str) -> StageDocument:
        async with agent_client() as client:
            began = time.perf_counter()
            begun = await client.stage(StageRequest(job_id=job_id, grant=grant))
            with progress_bars(self.output) as report:
                stage = ready_stage(await last_stage(client.follow(begun.id, 0.2), report))
        mount = stage.mounts[0]
        outcome = f"{counted(mount.files_total, 'file')}, {mount.view}, {mount.exposure}"
        self.note(title, outcome, began, tiers=mount.bytes_from, bytes=mount.bytes_total or 0)
        return stage

    async def evict(self, title: str, *, expected: str) -> None:
        async with mirror_client() as client:
            began = time.perf_counter()
            eviction = await client.evict(EvictionRequest(source=_SOURCE, tier="node"), _WAIT_SECONDS)
        if eviction.status != expected:
            raise InternalError(f"the eviction is {eviction.status}, not {expected}")
        holders = sum(len(item.holders) for item in eviction.items)
        outcome = f"refused: in use by {holders} jobs" if holders else f"{format_size(eviction.bytes_freed)} freed"
        self.note(title, outcome, began)

    def read(self, stage: StageDocument) -> None:
        """Open every staged shard, as a user's code would."""
        from safetensors import safe_open  # noqa: PLC0415 - an extra that only the demo needs

        began = time.perf_counter()
        tensors = 0
        for shard in sorted(Path(stage.mounts[0].path).glob("*.safetensors")):
            with safe_open(shard, framework="np") as weights:
                tensors += sum(weights.get_tensor(name).size > 0 for name in weights.keys())  # noqa: SIM118 - not a dict
        if tensors != _SHARDS:
            raise InternalError(f"{tensors} of {_SHARDS} tensors could be read")
        self.note("read with safetensors", f"{tensors} tensors", began)

    def note(self, title: str, outcome: str, began: float, **came: Any) -> None:  # noqa: ANN401 - checked by the model
        self.steps.append(Step(step=title, outcome=outcome, seconds=time.perf_counter() - began, **came))


async def _unstage(stages: Iterable[StageDocument]) -> None:
    async with agent_client() as client:
        for stage in stages:
            await client.unstage(stage.id)


@click.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Work in this new directory, and keep it.")
@click.option("--shard-mib", type=click.IntRange(1), default=_SHARD_MIB, help=f"Size of each of {_SHARDS} shards.")
@command_line
async def demo(output: Output, *, keep: Path | None, shard_mib: int) -> None:
    """Show BDN at work without a network: 1.1 GB of safetensors from a local S3 server.

    The demo mirrors the files, stages them cold, stages them from the cache, evicts them, and stages them again.

    \b
    Example: python examples/demo.py
    """
    with tempfile.TemporaryDirectory(prefix="bdn-demo-") as temporary:
        async with _services(output, keep or Path(temporary), shard_mib):
            run = _Demo(output)
            await run.run()
    output.result({"steps": [step.model_dump(mode="json") for step in run.steps]}, _table(run.steps))


@asynccontextmanager
async def _services(output: Output, folder: Path, shard_mib: int) -> AsyncIterator[None]:
    """The upstream with a model, a mirror and an agent, at addresses that commands in this process find."""
    output.say("making a model repository of safetensors")
    _make_model(folder / "model", shard_mib)
    output.say("serving it from a local S3 server")
    with _s3_server() as upstream:
        _fill_bucket(upstream, folder / "model")
        # The process's own environment: mirror and clients read it as on a laptop.
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": str(upstream.base_url).rstrip("/"),
            "AWS_ACCESS_KEY_ID": _KEY_ID,
            "AWS_SECRET_ACCESS_KEY": _KEY_ID,
            "BDN_EGRESS_ALLOW": _HOST,
            "BDN_DATA_DIR": str(folder / "data"),
            "BDN_AGENT_CACHE_DIR": str(folder / "cache"),
            "BDN_AGENT_SOCKET": str(folder / "agent.sock"),
            "BDN_AGENT_DATA_PORT": "0",
        }
        async with embedded_services(folder / "data", "the demo", output.say, serve=True) as (mirror, _):
            os.environ["BDN_URL"] = mirror.url
            try:
                yield
            finally:
                async with agent_client() as client:
                    standing = await client.stages()
                await _unstage(standing.items)  # no mount may remain below the directory that is removed next


# --- the model, and the server that it comes from ---


def _make_model(folder: Path, shard_mib: int) -> None:
    import numpy as np  # noqa: PLC0415 - an extra that only the demo needs
    from safetensors.numpy import save_file  # noqa: PLC0415

    random = np.random.default_rng()
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number in range(_SHARDS):
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        tensor = f"model.layers.{number}.mlp.weight"
        weights = np.frombuffer(random.bytes(shard_mib * 1024**2), dtype=np.float16).reshape(-1, 4096)
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
def _s3_server() -> Iterator[httpx2.Client]:
    """A client of the server, until the block ends. Moto accepts unsigned uploads."""
    with socket.create_server((_HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "moto.server", "-H", _HOST, "-p", str(port)]
    with (
        httpx2.Client(base_url=f"http://{_HOST}:{port}", trust_env=False, timeout=120) as client,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,  # noqa: S603
    ):
        try:
            _wait_for(process, client)
            yield client
        finally:
            process.terminate()


def _wait_for(process: subprocess.Popen[bytes], client: httpx2.Client) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.TransportError):
            client.get("/moto-api/")
            return
        time.sleep(0.05)
    raise UpstreamUnavailableError("the demo's S3 server", "it did not start; is the extra bdn[demo] installed?")


def _fill_bucket(client: httpx2.Client, folder: Path) -> None:
    """Upload every file of ``folder`` below the prefix ``model/``."""

    def put(target: str, content: bytes) -> None:
        answer = client.put(target, content=content)
        if answer.status_code != 200:
            reason = f"status {answer.status_code}: {answer.content[:200]!r}"
            raise UpstreamUnavailableError("the demo's S3 server", reason)

    put(f"/{_BUCKET}", b"")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(f"/{_BUCKET}/model/{quote(str(path.relative_to(folder)))}", path.read_bytes())


def _table(steps: Sequence[Step]) -> list[str]:
    return table(
        [
            {
                "step": step.step,
                "result": step.outcome,
                "upstream": format_size(step.upstream) if step.upstream else None,
                "mirror": format_size(step.tiers.mirror) if step.tiers.mirror else None,
                "cluster": format_size(step.tiers.cluster) if step.tiers.cluster else None,
                "node": format_size(step.tiers.node) if step.tiers.node else None,
                "seconds": f"{step.seconds:.3f}",
                "rate": f"{step.bytes / step.seconds / 1e9:.2f} GB/s" if step.bytes else None,
            }
            for step in steps
        ]
    )


if __name__ == "__main__":
    demo()
