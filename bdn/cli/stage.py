"""``bdn stage`` and ``bdn unstage``: files for a job on this node."""

import math

import click

from bdn.cli.clients import agent_client, both_services
from bdn.cli.output import DONE, FAILED, Output, command_line, parsed, progress_bars
from bdn.core.errors import InvalidRequestError
from bdn.core.units import counted, format_size, parse_duration
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import StageDocument, StageView


def _seconds(text: str) -> float:
    """Parse a duration, or a number of seconds. Raises ``ValueError``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = parse_duration(text)
    if not 0 < seconds < math.inf:
        raise ValueError("must be positive and finite")
    return seconds


@click.command()
@click.argument("mirror_id", metavar="MIRROR")
@click.option("--job", "job_id", required=True, metavar="ID", help="The job that will use the files.")
@click.option(
    "--ttl",
    "ttl_seconds",
    metavar="DURATION",
    callback=parsed(_seconds),
    help="Release the stage after this time (90m, 12h, 7d, or seconds).",
)
@click.option(
    "--view",
    type=click.Choice(("files", "hub")),
    default="files",
    help="hub: the repository's folder as in the cache of the hub's client.",
)
@click.option("--warm", is_flag=True, help="Read the files into memory in the background once they are READY.")
@click.option("--no-wait", is_flag=True, help="Return at once; the agent continues.")
@command_line
async def stage(
    output: Output,
    *,
    mirror_id: str,
    job_id: str,
    ttl_seconds: float | None,
    view: StageView,
    warm: bool,
    no_wait: bool,
) -> int:
    """Mount the files of a READY mirror for a job, and print the paths.

    MIRROR is the id of a mirror, or a checkpoint, bt://project@job/name, which needs no transfer to the mirror.

    With --view hub the path is a folder such as models--org--name. Mount it at that name below $HF_HUB_CACHE, or link it there, and
    huggingface_hub, transformers, datasets and vLLM find the repository offline by its name.

    \b
    Example: bdn stage mir_0123456789abcdef01234567 --job train-42
    Example: bdn stage mir_0123456789abcdef01234567 --job serve-1 --view hub
    Example: bdn stage bt://llama@train-41 --job train-42
    """
    async with both_services(output) as services:
        with progress_bars(output) as report:
            found = await services.begin_stage(
                mirror_id, job_id, ttl_seconds=ttl_seconds, warm=warm, report=report, view=view
            )
            if not no_wait:
                found = await services.last_stage(found.id, report)
    output.result(found, _stage_lines(found))
    if output.quiet and found.error is not None:
        output.error(found.error)
    return stage_code(found)


@click.command()
@click.argument("stage_id", required=False)
@click.option("--job", "job_id", metavar="ID", help="All stages of this job on this node.")
@click.option("--all", "is_all", is_flag=True, help="All stages on this node. Directories of pulls are not stages.")
@command_line
async def unstage(output: Output, *, stage_id: str | None, job_id: str | None, is_all: bool) -> None:
    """Unmount and remove the files of a stage. The cache still holds them.

    \b
    Example: bdn unstage stg_0123456789abcdef01234567
    Example: bdn unstage --job train-42
    Example: bdn unstage --all
    """
    if [stage_id is not None, job_id is not None, is_all].count(True) != 1:
        raise InvalidRequestError("name a stage, all stages of a job with --job, or all stages of this node with --all")
    async with agent_client() as agent:
        if stage_id is not None:
            found = await agent.unstage(stage_id)
            output.result(found, [f"{found.id} {found.state}"])
            return
        known = [stage for stage in (await agent.stages()).items if not stage.job_id.startswith("pull:")]
        chosen = [stage for stage in known if job_id in (None, stage.job_id)]
        ended = [await agent.unstage(stage.id) for stage in chosen if stage.state not in ("RELEASED", "FAILED")]
    none = "no stages on this node" if job_id is None else f"no stages of job {job_id} on this node"
    lines = [f"{stage.id} {stage.state}" for stage in ended] or [none]
    output.result(Items[StageDocument](items=ended), lines, [stage.id for stage in ended])


def stage_code(stage: StageDocument) -> int:
    """FAILED also for a READY stage with an error: its view lacks something, and no job should start with it."""
    is_lacking = stage.state == "READY" and stage.error is not None
    return FAILED if is_lacking or stage.state == "FAILED" else DONE


def _stage_lines(stage: StageDocument) -> list[str]:
    """Each mount's path is the last word of its line."""
    lines = [f"{stage.id} {stage.state}"]
    if stage.error is not None:
        lines.append(f"  {stage.error.message} [{stage.error.code}]")
    for mount in stage.mounts:
        if stage.state == "READY":
            came = mount.bytes_from
            lines.append(
                f"  {mount.mount_location}: {counted(mount.files_total, 'file')}, {format_size(mount.bytes_total or 0)} "
                f"(node {format_size(came.node)}, cluster {format_size(came.cluster)}, mirror {format_size(came.mirror)}) "
                f"at {mount.path}"
            )
    return lines
