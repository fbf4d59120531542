"""``bdn mirror``: ask a mirror for sources."""

import click

from bdn.cli.clients import mirror_client, request_body
from bdn.cli.output import DONE, FAILED, Output, command_line, progress_bar, waiting_for
from bdn.core.units import format_size
from bdn.wire.mirror_schema import Mirror, Plan


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option(
    "--mount", "mounts", multiple=True, metavar="PATH", help="Where the job sees it; once per source, in order."
)
@click.option("--allow", multiple=True, metavar="GLOB", help="Only these files; may be repeated.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option("--secret", metavar="NAME", help="The name of the secret that opens the sources.")
@click.option("--wait", is_flag=True, help="Stay until it is READY or FAILED.")
@click.option("--dry-run", is_flag=True, help="Show what would be transferred; write nothing.")
@command_line
async def mirror(
    output: Output,
    *,
    sources: tuple[str, ...],
    mounts: tuple[str, ...],
    allow: tuple[str, ...],
    ignore: tuple[str, ...],
    secret: str | None,
    wait: bool,
    dry_run: bool,
) -> int:
    """Mirror sources, and print the mirror's id for 'bdn stage'.

    \b
    Example: bdn mirror hf://org/model@main s3://bucket/data --mount /app/model --mount /app/data --wait
    """
    body = request_body(sources, mounts, allow, ignore, secret)
    async with mirror_client() as client:
        if dry_run:
            plan = await client.plan(body)
            output.result(plan, plan_lines(plan))
            return DONE
        found = await client.request(body)
        if wait:
            with progress_bar(output, "mirroring") as bar:
                async for latest in client.follow(found.id, outages=waiting_for(output, found.id)):
                    found = latest
                    bar.update(found.bytes_transferred + found.bytes_reused, found.bytes_total)
    for source in found.sources:
        for warning in source.warnings:
            output.warn(f"{source.source}: {warning}")
    output.result(found, mirror_lines(found))
    return FAILED if found.status in ("FAILED", "CANCELED") else DONE


def mirror_lines(mirror: Mirror) -> list[str]:
    """A mirror in words; the first line is the id and the status."""
    lines = [f"{mirror.id} {mirror.status}"]
    for source in mirror.sources:
        if source.error is not None:
            lines.append(f"  {source.source}: {source.error.message} [{source.error.code}]")
        elif source.bytes_total is not None:
            lines.append(
                f"  {source.source} -> {source.mount_location}: {source.files_total} files, "
                f"{format_size(source.bytes_total)}, {format_size(source.bytes_transferred)} transferred"
            )
    return lines


def plan_lines(plan: Plan) -> list[str]:
    """What would happen, in words."""
    lines = []
    for source in plan.sources:
        revision = f" at {source.resolved_revision}" if source.resolved_revision else ""
        lines.append(
            f"{source.source}{revision} -> {source.mount_location}: {source.files} files, {format_size(source.bytes)}, "
            f"{format_size(source.bytes_to_transfer)} to transfer, {format_size(source.bytes_reused)} held already"
        )
        lines.extend(f"  warning: {warning}" for warning in source.warnings)
    return lines
