"""Options of ``bdn pull``. The implementation is imported when it runs, so that ``--help`` does not wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bdn.cli.output import Output, command_line, progress_bars
from bdn.core.units import counted, format_size

if TYPE_CHECKING:
    from bdn.local.pulled import Pulled


@click.command()
@click.argument("source")
@click.argument("dest", type=click.Path(path_type=Path), required=False)
@click.option("--allow", multiple=True, metavar="GLOB", help="Only these files; may be repeated. ** crosses folders.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option(
    "--secret", metavar="NAME", help="The secret with the credentials of the source, as in BDN_SECRET_<NAME>."
)
@click.option("--offline", is_flag=True, help="Do not contact the upstream; use the last pulled revision of SOURCE.")
@click.option("--replace", is_flag=True, help="Delete files at DEST that an earlier pull of another source put there.")
@click.option(
    "--link",
    is_flag=True,
    help="Hard links into the cache, on one file system: no extra space, but edits change the cache.",
)
@click.option(
    "--hub-cache",
    is_flag=False,
    flag_value="",
    metavar="[DIR]",
    help="Instead of DEST: into the cache of the hub's client, below DIR ($HF_HUB_CACHE).",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
@command_line
async def pull(
    output: Output,
    *,
    source: str,
    dest: Path | None,
    allow: tuple[str, ...],
    ignore: tuple[str, ...],
    secret: str | None,
    offline: bool,
    replace: bool,
    link: bool,
    hub_cache: str | None,
    dry_run: bool,
) -> None:
    """Download SOURCE to DEST, verified and cached.

    A source is hf://, s3://, gs://, r2://, cw://, azure://, https:// (one file), or bt:// (a checkpoint).
    The files share blocks with the cache where the file system supports reflinks (xfs, btrfs). Elsewhere they are copies, which
    need the same space again. With --link they are the cache's own files; the cache verifies an edited file before it uses the
    file again. DEST must be new, empty, or from an earlier pull; --replace permits another source or other patterns.
    After DEST is removed, the cache may evict the files. A commit that was pulled before needs no request to the upstream.

    With --hub-cache, huggingface_hub, transformers and vLLM find the repository offline by its name. Its files are hard links
    into the cache where possible. Other repositories, commits and refs in the hub cache stay as they are.

    \b
    Example: bdn pull hf://org/model@main ./model --allow '**/*.safetensors' --allow '*.json'
    Example: bdn pull s3://bucket/data ./data --secret my_keys
    Example: bdn pull hf://org/model ./model --dry-run --json
    Example: bdn pull hf://org/model --hub-cache
    """
    from bdn.cli.collector import spare_collector  # noqa: PLC0415
    from bdn.local.pull import plan_files, pull_files  # noqa: PLC0415
    from bdn.local.pulled import Pull  # noqa: PLC0415
    from bdn.settings import ClientSettings  # noqa: PLC0415
    from bdn.wire.named_sources import request_body  # noqa: PLC0415

    if (dest is None) == (hub_cache is None):
        raise click.UsageError("name either DEST or --hub-cache [DIR], after SOURCE")
    if hub_cache is not None and (replace or link):
        raise click.UsageError("--replace and --link are for DEST: --hub-cache links anyway, and removes nothing")
    (wanted,) = request_body((source,), allow=allow, ignore=ignore, secret=secret).sources()
    settings = ClientSettings()
    if dest is None:
        asked = Pull.into_hub_cache(wanted, Path(hub_cache) if hub_cache else None, offline=offline)
    else:
        asked = Pull(wanted, dest, offline=offline, replace=replace, link=link)
    spare_collector()
    if dry_run:
        planned = await plan_files(asked, settings, output.say)
        output.result(planned, planned.lines())
        return
    with progress_bars(output) as report:
        pulled = await pull_files(asked, settings, output.say, report)
    for warning in pulled.warnings:
        output.warn(warning)
    output.result(pulled, [_line(pulled)])


def _line(pulled: Pulled) -> str:
    return (
        f"{pulled.destination}: {counted(pulled.files_total, 'file')}, {format_size(pulled.bytes_total)}, ready in "
        f"{pulled.seconds:.2f} s ({format_size(pulled.bytes_transferred)} from the upstream, "
        f"{format_size(pulled.bytes_from.mirror)} from the mirror, {format_size(pulled.bytes_from.node)} held already)"
    )
