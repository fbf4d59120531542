"""``bdn-admin verify``: what is held is read again, compared with its names, and repaired."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from bdn.cli.clients import agent_client, reachable_mirror
from bdn.cli.output import DONE, FAILED, Output, check_usage, command_line, waiting_for
from bdn.core.units import format_size
from bdn.wire.operation_schema import (
    DamagedItem,
    PathVerification,
    PathVerificationRequest,
    Tier,
    Verification,
    VerificationRequest,
)


@click.command()
@click.argument("what", metavar="[PATH|MANIFEST|SOURCE]", required=False)
@click.option("--all", "everything", is_flag=True, help="Everything that is held.")
@click.option("--tier", type=click.Choice(["node", "cluster", "mirror"]), help="Only this tier.")
@click.option("--cluster", metavar="NAME", help="Only agents of this cluster.")
@click.option("--node", metavar="NAME", help="Only this node.")
@click.option(
    "--no-repair", is_flag=True, help="Look only. Wrong bytes of the mirror's store are quarantined all the same."
)
@command_line
async def verify(
    output: Output,
    *,
    what: str | None,
    everything: bool,
    tier: Tier | None,
    cluster: str | None,
    node: str | None,
    no_repair: bool,
) -> int:
    """Read again what is held, find wrong bytes, and repair them from agents, the mirror or the upstream.

    A path is that of a file or a folder of a stage on this machine, and is verified by this machine's agent. A manifest
    (b3:...), a source, or --all are verified on the mirror and on all agents. The exit code is 0 when nothing is wrong any
    more, 1 when damage is left, and 4 when there is no such thing.

    \b
    Example: bdn-admin verify hf://org/model
    Example: bdn-admin verify --all --tier mirror --no-repair
    Example: bdn-admin verify /mnt/models/llama/model-00001.safetensors
    """
    if what is not None and is_path(what):
        if everything or tier or cluster or node:
            raise click.UsageError(
                "a path is verified by this machine's agent: leave out --all, --tier, --cluster and --node"
            )
        return await _verify_path(output, what, repair=not no_repair)
    is_manifest = what is not None and what.startswith("b3:")
    request = VerificationRequest(
        source=None if is_manifest else what,
        manifest=what if is_manifest else None,
        all=everything,
        tier=tier,
        cluster=cluster,
        node=node,
        repair=not no_repair,
    )
    check_usage(request)
    async with reachable_mirror(output) as client:
        found = await client.verify(request)
        output.say(f"verifying ({found.id})")
        waiting = waiting_for(output, found.id)
        while found.status == "RUNNING":
            found = await waiting.ask(partial(client.verification, found.id))
    output.result(found, _lines(found, [f"no answer from {agent}" for agent in found.unreachable]))
    return DONE if found.status == "DONE" else FAILED


def is_path(what: str) -> bool:
    """A source has a scheme and a manifest a prefix; what begins like a path, or is there, is a path."""
    return what.startswith(("/", ".")) or (":" not in what and Path(what).exists())


async def _verify_path(output: Output, what: str, *, repair: bool) -> int:
    async with agent_client() as client:
        report = await client.verify(PathVerificationRequest(path=_absolute(what), repair=repair))
    output.result(report, _lines(report, []))
    is_left = any(item.outcome != "repaired" for item in report.items)
    return FAILED if report.error is not None or is_left else DONE


def _absolute(what: str) -> str:
    """With its links: where a job sees its files may be one, and the agent knows what it has put there."""
    return str(Path(what).absolute())


def _lines(found: Verification | PathVerification, remarks: Sequence[str]) -> list[str]:
    lines = [*map(_item_line, found.items), *remarks]
    if found.error is not None:
        lines.append(f"{found.error.message} [{found.error.code}]")
    repaired = sum(item.outcome == "repaired" for item in found.items)
    left = len(found.items) - repaired
    total = f"read {found.chunks_read} chunks, {format_size(found.bytes_read)}: {repaired} repaired, {left} damaged ({found.id})"
    return [*lines, total]


def _item_line(item: DamagedItem) -> str:
    where = item.tier if item.node is None else f"{item.tier} {item.cluster}/{item.node}"
    names = ", ".join(item.sources) or (f"{item.manifest[:15]}…" if item.manifest else "")
    what = " of ".join(part for part in (item.path, names) if part)
    return f"{item.outcome} {where}: {item.chunk}{f' in {what}' if what else ''}: {item.reason}"
