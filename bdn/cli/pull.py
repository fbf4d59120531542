"""Options of ``bdn pull``. The implementation is imported when it runs, so that ``--help`` does not wait for it."""

from pathlib import Path

import click

from bdn.cli.output import Output, command_line


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
    from bdn.cli.hub_cache import HubRepository, PullPlace, hub_cache_root  # noqa: PLC0415
    from bdn.cli.pulled import check_held, is_standing  # noqa: PLC0415
    from bdn.cli.sources import request_body  # noqa: PLC0415
    from bdn.sources.environment import forbids_hub  # noqa: PLC0415

    if (dest is None) == (hub_cache is None):
        raise click.UsageError("name either DEST or --hub-cache [DIR], after SOURCE")
    if hub_cache is not None and (replace or link):
        raise click.UsageError("--replace and --link are for DEST: --hub-cache links anyway, and removes nothing")
    (wanted,) = request_body((source,), allow=allow, ignore=ignore, secret=secret).sources()
    if dest is None:
        repository = HubRepository.of(wanted, Path(hub_cache) if hub_cache else hub_cache_root())
        place = PullPlace(repository.folder, link=True, hub=repository)
    else:
        place = PullPlace(dest, link=link)
    if not offline and wanted.source.scheme == "hf" and (forbidden := forbids_hub()):
        output.say(f"{forbidden}: no requests to the hub, as with --offline")
        offline = True
    if offline:
        check_held(wanted)
    if not dry_run and await is_standing(output, wanted, place, offline=offline):
        return
    from bdn.cli.pulling import run_pull  # noqa: PLC0415 - mirror and agent: 1.5 s

    await run_pull(output, wanted, place, offline=offline, replace=replace, dry_run=dry_run)
