"""``bdn sync``: pushes what a job writes as checkpoints."""

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import click

from bdn.cli.output import DONE, FAILED, Output, command_line, parsed, waiting_for
from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import CheckpointUri, parse_source
from bdn.core.units import counted, format_size, parse_duration, parse_size
from bdn.net.tls import Authorities
from bdn.settings import ClientSettings
from bdn.wire.mirror_schema import Mirror, MirrorSource

_NICENESS: Final = 10  # nice(1): the job that writes the checkpoints has priority


def _seconds(text: str) -> float:
    seconds = parse_duration(text)
    if not 0 <= seconds < math.inf:
        raise ValueError("must be zero or a positive, finite time")
    return seconds


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(resolve_path=True, path_type=Path))
@click.argument("job", metavar="JOB")
@click.option("--once", is_flag=True, help="Upload complete checkpoints and exit; exit code 1 if one is incomplete.")
@click.option(
    "--settle",
    "settle_seconds",
    metavar="DURATION",
    default="30s",
    callback=parsed(_seconds),
    help="Upload a checkpoint once it has been unchanged this long.",
)
@click.option(
    "--rate", metavar="SIZE", callback=parsed(parse_size), help="Upload at most this much per second (200MB)."
)
@command_line
async def sync(
    output: Output, *, directory: Path, job: str, once: bool, settle_seconds: float, rate: int | None
) -> int:
    """Upload a job's checkpoints as they are written.

    Each folder of DIR is a checkpoint, uploaded once it stops changing. Runs until interrupted.

    Ranks other than the first name themselves: bt://project@job#rank-1. A checkpoint becomes visible only when complete. Uploaded
    checkpoints stay when the job deletes its files; a changed checkpoint is uploaded again. Temporary folders (tmp-*, *.tmp, hidden)
    are skipped. The command runs with a niceness of 10 above its caller's, so that the job gets the processors first.

    \b
    Example: bdn sync /scratch/ckpts bt://llama@train-42
    Example: bdn sync /scratch/ckpts bt://llama@train-42 --once
    """
    with suppress(OSError):  # sandboxes may refuse it; job and sync then have equal priority
        os.nice(_NICENESS)
    uri = parse_source(job)
    if not isinstance(uri, CheckpointUri) or uri.job is None or uri.checkpoint is not None:
        raise InvalidRequestError(
            f"{job} does not name a job: use bt://project@job, or bt://project@job#rank-1 for its second rank"
        )
    if not await asyncio.to_thread(directory.is_dir):
        raise InvalidRequestError(f"{directory} is not a directory; create it before the job starts")
    (embedded,) = entry_points(group="bdn.embedded", name="sync")
    sync_directory: Callable[..., Awaitable[tuple[dict[str, str], dict[str, str]]]] = embedded.load()
    settings = ClientSettings()
    pushed: list[MirrorSource] = []

    def tell(mirror: Mirror) -> None:
        (part,) = mirror.sources
        pushed.append(part)
        size = f"{counted(part.files_total, 'file')}, {format_size(part.bytes_total or 0)}"
        output.say(f"pushed {part.source}: {size}, {format_size(part.bytes_transferred)} sent")

    left, skipped = await sync_directory(
        directory,
        uri,
        url=settings.url,
        token=settings.token,
        authorities=Authorities(settings.tls_ca),
        data_dir=settings.data_dir,
        settle_seconds=settle_seconds,
        rate=rate,
        is_once=once,
        on_pushed=tell,
        outages=waiting_for(output, str(uri)),
    )
    document = {
        "pushed": [part.model_dump(mode="json") for part in pushed],
        "left": list(left),
        "reasons": left,
        "skipped": skipped,
    }
    lines = [f"not complete: {name}: {why}" for name, why in left.items()]
    lines += [f"not pushed: {path} {why}" for path, why in skipped.items()]
    lines = lines or [f"{counted(len(pushed), 'checkpoint')} pushed"]
    output.result(document, lines, [part.source for part in pushed])
    return FAILED if left or skipped else DONE
