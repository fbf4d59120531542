"""``bdn volumes``: bounded directories that a job writes on this node, from a shell, a prolog or an init container."""

import asyncio
import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import click

from bdn.cli.clients import agent_client, both_services
from bdn.cli.output import DONE, FAILED, Output, command_line, parsed, progress_bars, table, waiting_for
from bdn.client.services import Services
from bdn.core.errors import BdnError, InvalidRequestError, NotFoundError, SourceNotFoundError
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.units import format_size, parse_size
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.waiting import grant_of, ready_mirror, ready_stage
from bdn.wire.cache_schema import CacheRequest
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS
from bdn.wire.job_schema import LARGEST_ID, JobVolume, JobVolumeRequest
from bdn.wire.mirror_schema import MirrorRequestBody, WeightsSourceBody
from bdn.wire.push_schema import Checkpoint, PushGrantRequest
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import StageDocument, StageRequest

_GRACE_SECONDS: Final = 30.0  # between SIGTERM and SIGKILL
_LOOK_SECONDS: Final = 0.2


@click.group()
def volumes() -> None:
    """Create, list and remove writable job directories (scratch, checkpoints, caches)."""


@volumes.command()
@click.option("--job", "run_id", required=True, metavar="ID", help="The job; job and rank name the volume.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank of this node in the job.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes of the job, for --load.")
@click.option(
    "--scratch", metavar="SIZE", callback=parsed(parse_size), help="Create scratch space with this limit (10GB)."
)
@click.option(
    "--checkpoints", metavar="SIZE", callback=parsed(parse_size), help="Create a checkpoint directory with this limit."
)
@click.option("--project", metavar="NAME", help="Upload the checkpoints as bt://NAME@ID.")
@click.option("--cache", metavar="PROJECT", help="Mount the training caches of a project and of its team.")
@click.option("--gpu", metavar="TYPE", help="The GPU type that the job needs, for --cache.")
@click.option(
    "--any-cluster", is_flag=True, help="With --cache: use an empty cache here if the project's is in another cluster."
)
@click.option("--huggingface", is_flag=True, help="With --cache: also mount the project's Hugging Face hub cache.")
@click.option("--uid", type=click.IntRange(0, LARGEST_ID), help="User of the job; default: the caller.")
@click.option("--gid", type=click.IntRange(0, LARGEST_ID), help="The group of the directories.")
@click.option("--load", metavar="SOURCE", help="Stage a checkpoint: bt://project, bt://project@job/name.")
@command_line
async def create(
    output: Output,
    *,
    run_id: str,
    rank: int,
    nodes: int | None,
    scratch: int | None,
    checkpoints: int | None,
    project: str | None,
    cache: str | None,
    gpu: str | None,
    any_cluster: bool,
    huggingface: bool,
    uid: int | None,
    gid: int | None,
    load: str | None,
) -> None:
    """Create a job's writable directories on this node, and print its environment as shell assignments.

    The directories are private to one user; a caller such as a root prolog names the job's user with --uid. Scratch is empty,
    limited and deleted with the volume. The agent uploads checkpoints in the background. The same command again returns the same
    volume.

    \b
    Example: eval "$(bdn volumes create --job train-42 --scratch 10GB --checkpoints 100GB --project llama)"
    Example: bdn volumes create --job train-43 --cache llama
    Example: bdn volumes create --job train-43 --checkpoints 100GB --project llama --load bt://llama --json
    """
    grant, cache_grant, stage = None, None, None
    async with both_services(output) as services:
        mirror, agent = services.mirrors, services.agent
        if checkpoints is not None:
            if project is None:
                raise InvalidRequestError("--checkpoints needs --project: checkpoints are pushed as bt://project@job")
            job = str(CheckpointUri(project, run_id, rank=rank))
            if parse_source(job) != CheckpointUri(project, run_id, rank=rank):
                raise InvalidRequestError(
                    f"{job} does not name a job: leave @, / and # out of the names of project and job"
                )
            grant = (await mirror.grant_pushes(PushGrantRequest(job=job))).grant
        if cache is not None:
            shared = await agent.shared_caches()
            wanted = CacheRequest(
                project=cache,
                cluster=shared.cluster,
                volume_id=shared.volume_id,
                gpu_type=gpu,
                require_cache_affinity=not any_cluster,
            )
            cache_grant = (await mirror.grant_cache(wanted)).grant
        if load is not None:
            stage = await _loaded(output, services, load, run_id=run_id, rank=rank, nodes=nodes)
        request = JobVolumeRequest(
            run_id=run_id,
            rank=rank,
            uid=uid,
            gid=gid,
            scratch_bytes=scratch,
            checkpoint_bytes=checkpoints,
            push_grant=grant,
            cache_grant=cache_grant,
            huggingface=huggingface,
        )
        made = await agent.make_volume(request)
    environment = _environment(made, stage)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    places = dict.fromkeys(shlex.quote(value) for value in environment.values() if value.startswith("/"))
    output.say(
        f"in a container, mount them at the same paths: docker run {' '.join(f'-v {at}:{at}' for at in places)} …"
    )
    document = {"volume": made.model_dump(mode="json"), "environment": environment}
    output.result(document, lines, lines)


def _environment(volume: JobVolume, stage: StageDocument | None) -> dict[str, str]:
    found = {"BDN_JOB_VOLUME": volume.id}
    if volume.scratch is not None:
        found["BT_SCRATCH_DIR"] = volume.scratch.path
    if volume.checkpoints is not None:
        found["BT_CHECKPOINT_DIR"] = volume.checkpoints.path
    if volume.caches is not None:
        found["BT_PROJECT_CACHE_DIR"] = found["BT_RW_CACHE_DIR"] = volume.caches.project
        found["BT_TEAM_CACHE_DIR"] = volume.caches.team
        if volume.caches.huggingface is not None:
            found["BDN_HUGGINGFACE_CACHE_DIR"] = volume.caches.huggingface
    if stage is not None:
        (mount, *_) = stage.mounts
        found["BT_LOAD_CHECKPOINT_DIR"] = mount.path.removesuffix(mount.mount_location)
    return found


async def _loaded(
    output: Output, services: Services, source: str, *, run_id: str, rank: int, nodes: int | None
) -> StageDocument | None:
    """Stage a checkpoint's files at ``rank-<n>/<name>``. None: the project has none yet, the job is its first run."""
    uri = parse_source(source)
    if not isinstance(uri, CheckpointUri):
        raise InvalidRequestError(f"--load takes a checkpoint, such as bt://project@job/name, and not {source}")
    ranks = await _ranks(services.mirrors, uri, nodes)
    if not ranks:
        if uri.job is None and uri.checkpoint is None:
            output.say(f"{source} has no checkpoint: the job starts without one")
            return None
        raise SourceNotFoundError(source, "no such checkpoint was pushed, or it was deleted")
    wanted = [one for one in ranks if nodes != len(ranks) or one.rank in (0, rank)]
    weights = [
        WeightsSourceBody(source=one.source, mount_location=f"/rank-{one.rank}/{one.checkpoint_id}") for one in wanted
    ]
    begun = await services.mirrors.request(MirrorRequestBody(weights=weights))
    with progress_bars(output) as report:
        ready = ready_mirror(await services.last_mirror(begun.id, report))
        stage = await services.agent.stage(StageRequest(job_id=run_id, grant=grant_of(ready)))
        return ready_stage(await services.last_stage(stage.id, report))


async def _ranks(mirror: MirrorClient, uri: CheckpointUri, nodes: int | None) -> list[Checkpoint]:
    """All ranks of the newest checkpoint of the source, preferably the newest pushed by at least ``nodes`` ranks.

    The very newest may lack a rank that was killed before its push.
    """
    named: dict[tuple[str, str], list[Checkpoint]] = {}
    for one in (await mirror.checkpoints(uri.project, uri.job)).items:  # oldest first
        if uri.checkpoint in (None, one.checkpoint_id):
            named.setdefault((one.job, one.checkpoint_id), []).append(one)
    if uri.checkpoint is None:
        named = {name: ranks for name, ranks in named.items() if any(one.is_loadable for one in ranks)}
    newest = sorted(named.values(), key=lambda ranks: nodes is not None and len(ranks) >= nodes)
    return sorted(newest[-1], key=lambda one: one.rank) if newest else []


@volumes.command()
@command_line
async def ls(output: Output) -> None:
    """List the job volumes of this node, newest first.

    \b
    Example: bdn volumes ls
    """
    async with agent_client() as agent:
        found = await agent.volumes()
    output.result(found, _lines(found.items, "no job volumes"), [one.id for one in found.items])


@volumes.command()
@click.argument("volume", required=False)
@click.option("--job", "run_id", metavar="ID", help="All volumes of this job on this node.")
@click.option("--all", "is_all", is_flag=True, help="All job volumes on this node.")
@click.option("--wait", is_flag=True, help="Wait until all checkpoints are uploaded and the volume is gone.")
@command_line
async def rm(output: Output, *, volume: str | None, run_id: str | None, is_all: bool, wait: bool) -> None:
    """Remove VOLUME, or all volumes of a job or of this node, when the job has ended.

    Scratch is deleted now; the rest once its checkpoints are uploaded.

    \b
    Example: bdn volumes rm jv_0123456789abcdef01234567
    Example: bdn volumes rm --job train-42 --wait
    Example: bdn volumes rm --all
    """
    if (volume is not None) + (run_id is not None) + is_all != 1:
        raise InvalidRequestError("name a volume, a job with --job, or all volumes of this node with --all")
    async with agent_client() as agent:
        known = (await agent.volumes()).items if volume is None else []
        names = [volume] if volume is not None else [one.id for one in known if is_all or one.run_id == run_id]
        ended = [await agent.end_volume(name) for name in names]
        if wait:
            ended = [await _until_ended(output, agent, one) for one in ended]
    lines = _lines(ended, f"{'this node' if is_all else f'job {run_id}'} has no job volumes")
    output.result(Items[JobVolume](items=ended), lines, [one.id for one in ended])


async def _until_ended(output: Output, agent: AgentClient, volume: JobVolume) -> JobVolume:
    outages = waiting_for(output, volume.id)
    while volume.state != "ENDED":
        try:
            volume = await outages.ask(partial(agent.volume, volume.id, LONGEST_WAIT_SECONDS))
        except BdnError as error:
            if error.code != NotFoundError.code:
                raise
            volume = volume.model_copy(update={"state": "ENDED"})
    return volume


@volumes.command()
@click.argument("volume")
@click.option(
    "--pid", type=click.IntRange(min=2), required=True, help="The process to stop, with its group if it leads one."
)
@command_line
async def guard(output: Output, *, volume: str, pid: int) -> int:
    """Stop a process when its volume exceeds its limit: SIGTERM, then SIGKILL after 30 seconds. Exits with the process or the volume.

    Only needed where the agent watches limits ('watch'); a volume with its own file system returns ENOSPC.

    \b
    Example: bdn volumes guard "$BDN_JOB_VOLUME" --pid $$ &
    """
    outages = waiting_for(output, volume)
    async with agent_client() as agent:
        while _is_alive(pid):
            found = await outages.ask(partial(agent.volume, volume, 1))
            if found.error is not None:
                output.say(f"{found.error.message} [{found.error.code}]")
                await _stop(pid)
                output.result(found, [f"process {pid} was stopped"], [str(pid)])
                return FAILED
            if found.state != "OPEN":
                break
            await asyncio.sleep(_LOOK_SECONDS)
    output.result({"volume": volume, "stopped": False}, ["nothing was stopped"], [])
    return DONE


async def _stop(pid: int) -> None:
    _signal(pid, signal.SIGTERM)
    for _ in range(round(_GRACE_SECONDS / _LOOK_SECONDS)):
        await asyncio.sleep(_LOOK_SECONDS)
        if not _is_alive(pid):
            return
    _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _lines(volumes: Sequence[JobVolume], empty: str) -> list[str]:
    lines = table([_row(one) for one in volumes], empty)
    for one in volumes:
        problems = (None if one.checkpoints is None else one.checkpoints.error, one.error)
        lines += [f"{one.id}: {error.message} [{error.code}]" for error in problems if error is not None]
    return lines


def _row(one: JobVolume) -> dict[str, object]:
    scratch, kept = one.scratch, one.checkpoints
    used = None if scratch is None or scratch.used_bytes is None else format_size(scratch.used_bytes)
    return {
        "volume": one.id,
        "state": one.state,
        "job": one.run_id,
        "rank": one.rank,
        "created": one.created_at,
        "scratch": scratch and f"{used or '?'} of {format_size(scratch.bytes)}",
        "checkpoints": kept and f"{kept.sync_status}, {format_size(kept.unsynced_bytes)} to push",
        "scratch path": scratch and scratch.path,
        "checkpoint path": kept and kept.path,
    }
