"""``bdn mirror``: request sources from a mirror."""

from typing import Any

import click

from bdn.cli.clients import both_services
from bdn.cli.output import DONE, FAILED, Output, command_line, in_options, progress_bars
from bdn.core.units import counted, format_size
from bdn.wire.mirror_schema import Mirror, Plan
from bdn.wire.named_sources import request_body


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option(
    "--mount", "mounts", multiple=True, metavar="PATH", help="Mount point in the job; once per source, in order."
)
@click.option("--allow", multiple=True, metavar="GLOB", help="Only these files; may be repeated.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option("--secret", metavar="NAME", help="The secret with the credentials of the sources.")
@click.option("--wait", is_flag=True, help="Wait until the mirror is READY or FAILED.")
@click.option("--dry-run", is_flag=True, help="Print what would be transferred; write nothing.")
@command_line
async def mirror(output: Output, *, wait: bool, dry_run: bool, **asked: Any) -> int:  # noqa: ANN401 - of request_body
    """Mirror sources, and print the mirror's id for 'bdn stage'.

    A source is hf://, s3://, gs://, r2://, cw://, azure://, https:// (one file), or bt:// (a checkpoint).

    \b
    Example: bdn mirror hf://org/model@main s3://bucket/data --mount /app/model --mount /app/data --wait
    """
    body = request_body(**asked)
    async with both_services(output) as services:
        if dry_run:
            plan = await services.mirrors.plan(body)
            output.result(plan, _plan_lines(plan))
            return DONE
        found = await services.mirrors.request(body)
        if wait:
            with progress_bars(output) as report:
                found = await services.last_mirror(found.id, report)
    for source in found.sources:
        for warning in source.warnings:
            output.warn(f"{source.source}: {warning}")
    output.result(found, _mirror_lines(found))
    if output.quiet and found.error is not None:
        output.error(found.error)
    return FAILED if found.status in ("FAILED", "CANCELED") else DONE


def _mirror_lines(mirror: Mirror) -> list[str]:
    lines = [f"{mirror.id} {mirror.status}"]
    for source in mirror.sources:
        if source.error is not None:
            lines.append(f"  {source.source}: {in_options(source.error.message)} [{source.error.code}]")
        elif source.bytes_total is not None:
            lines.append(
                f"  {source.source} -> {source.mount_location}: {counted(source.files_total, 'file')}, "
                f"{format_size(source.bytes_total)}, {format_size(source.bytes_transferred)} transferred"
            )
    return lines


def _plan_lines(plan: Plan) -> list[str]:
    lines = []
    for source in plan.sources:
        revision = f" at {source.resolved_revision}" if source.resolved_revision else ""
        lines.append(
            f"{source.source}{revision} -> {source.mount_location}: {counted(source.files, 'file')}, {format_size(source.bytes)}, "
            f"{format_size(source.bytes_to_transfer)} to transfer, {format_size(source.bytes_reused)} held already"
        )
        lines.extend(f"  warning: {in_options(warning)}" for warning in source.warnings)
    return lines
