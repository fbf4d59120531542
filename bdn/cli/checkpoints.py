"""``bdn checkpoints``: the checkpoints that jobs pushed."""

from pathlib import Path

import click

from bdn.cli.clients import both_services, mirror_client
from bdn.cli.output import DONE, Output, command_line, fields_of, parsed, progress_bars, table, when
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.units import counted, format_size, parse_duration
from bdn.local.running_agent import RunningAgent, named
from bdn.net.api_clients import MirrorClient
from bdn.net.waiting import grant_of, ready_mirror, ready_stage
from bdn.wire.mirror_schema import MirrorRequestBody, WeightsSourceBody
from bdn.wire.push_schema import Checkpoint, PushGrantRequest
from bdn.wire.shapes import Items
from bdn.wire.stage_schema import PullRequest


@click.group()
def checkpoints() -> None:
    """List, download and delete the checkpoints of jobs, named bt://project@job/checkpoint."""


def _named(source: str) -> CheckpointUri:
    uri = parse_source(source)
    if not isinstance(uri, CheckpointUri):
        raise InvalidRequestError(f"{source} is not a checkpoint: name one such as bt://project@job/checkpoint")
    return uri


async def _found(client: MirrorClient, uri: CheckpointUri) -> list[Checkpoint]:
    """The matching checkpoints of all ranks, oldest first; without a job, of all jobs."""
    listed = (await client.checkpoints(uri.project, uri.job)).items
    return [one for one in listed if uri.checkpoint in (None, one.checkpoint_id)]


@checkpoints.command()
@click.argument("job", metavar="JOB")
@click.option(
    "--expires",
    "expires_seconds",
    metavar="DURATION",
    default="30d",
    callback=parsed(parse_duration),
    help="Lifetime of the token (12h, 30d).",
)
@command_line
async def grant(output: Output, *, job: str, expires_seconds: float) -> None:
    """Print a BDN_TOKEN for one rank of a job: it permits 'bdn sync' to upload checkpoints of this rank, and nothing else.

    \b
    Example: BDN_TOKEN=$(bdn checkpoints grant bt://llama@train-42#rank-1 -q) bdn sync /ckpts bt://llama@train-42#rank-1
    """
    async with mirror_client() as client:
        made = await client.grant_pushes(PushGrantRequest(job=job, expires_seconds=int(expires_seconds)))
    output.say(f"for {made.job}, until {when(made.expires_at)}:")
    output.result(made, [made.grant], [made.grant])


@checkpoints.command()
@click.argument("source", required=False)
@command_line
async def ls(output: Output, *, source: str | None) -> None:
    """List checkpoints, oldest first: all, or the checkpoints of SOURCE, such as bt://project or bt://project@job.

    \b
    Example: bdn checkpoints ls bt://llama@train-42
    """
    async with mirror_client() as client:
        if source is None:
            found = (await client.checkpoints()).items
        else:
            found = await _found(client, _named(source))
    rows = [fields_of(one, "source sync_status checkpoint_type files size_bytes created_at") for one in found]
    output.result(Items[Checkpoint](items=found), table(rows, "no checkpoints"), [one.source for one in found])


@checkpoints.command()
@click.argument("source")
@click.argument("dest", type=click.Path(resolve_path=True, path_type=Path))
@command_line
async def pull(output: Output, *, source: str, dest: Path) -> int:
    """Download a checkpoint to DEST, verified, through the cache of this node's agent.

    Without a name in SOURCE, the newest checkpoint. DEST must be new, empty, or from an earlier pull.

    \b
    Example: bdn checkpoints pull bt://llama@train-42 ./newest
    """
    uri = _named(source)
    body = MirrorRequestBody(weights=[WeightsSourceBody(source=str(uri), mount_location="/checkpoint")])
    async with both_services(output) as services:
        await RunningAgent(services.agent).check_destination(dest)
        begun = await services.mirrors.request(body)
        with progress_bars(output) as report:
            mirror = ready_mirror(await services.last_mirror(begun.id, report))
            stage = await services.agent.pull(PullRequest(destination=named(dest), grant=grant_of(mirror)))
            done = ready_stage(await services.last_stage(stage.id, report))
    (part,) = mirror.sources
    size = f"{counted(part.files_total, 'file')}, {format_size(part.bytes_total or 0)}"
    output.result(done, [f"{part.resolved_revision}: {size} at {dest}"], [str(dest)])
    return DONE


@checkpoints.command()
@click.argument("source")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Delete all checkpoints with weights except the newest N.",
)
@command_line
async def rm(output: Output, *, source: str, keep_last: int | None) -> None:
    """Delete a checkpoint with all its ranks, or all checkpoints of a job. This cannot be undone; manifests mirrored from a checkpoint stay.

    \b
    Example: bdn checkpoints rm bt://llama@train-42/checkpoint-100
    Example: bdn checkpoints rm bt://llama@train-42 --keep-last 3
    """
    uri = _named(source)
    if uri.job is None:
        raise InvalidRequestError(
            f"{source} does not name a job: to delete all of a job's checkpoints, name it as bt://project@job"
        )
    async with mirror_client() as client:
        found = await _found(client, uri)
        if not found:
            raise NotFoundError(f"checkpoint {uri}")
        loadable = {one.checkpoint_id for one in found if one.is_loadable}
        counted_names = loadable if keep_last is not None else {one.checkpoint_id for one in found}
        names = list(dict.fromkeys(one.checkpoint_id for one in found if one.checkpoint_id in counted_names))
        going = set(names if keep_last is None else names[:-keep_last])
        removed = [await client.remove_checkpoint(one.id) for one in found if one.checkpoint_id in going]
    lines = [f"deleted {one.source}" for one in removed] or ["nothing to delete"]
    output.result(Items[Checkpoint](items=removed), lines, [one.source for one in removed])
