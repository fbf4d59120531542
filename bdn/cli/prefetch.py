"""``bdn-admin prefetch``: files come to nodes before a job asks for them."""

from functools import partial
from typing import Final

import click

from bdn.cli.clients import reachable_mirror
from bdn.cli.output import DONE, FAILED, Output, check_usage, command_line, progress_bar, waiting_for
from bdn.core.units import format_size
from bdn.net.client import LONGEST_WAIT_SECONDS
from bdn.wire.operation_schema import Prefetch, PrefetchNode, PrefetchRequest

_LOOK_AGAIN_SECONDS: Final = 2.0  # as often as agents tell how far they are


@click.command()
@click.argument("what", metavar="SOURCE|MIRROR_ID|MANIFEST")
@click.option("--cluster", metavar="NAME", help="To the living nodes of this cluster; with --node, to those of them.")
@click.option("--node", "nodes", multiple=True, metavar="NAME", help="To this node; may be given several times.")
@click.option("--wait", is_flag=True, help="Until every node has it, or has failed.")
@command_line
async def prefetch(output: Output, *, what: str, cluster: str | None, nodes: tuple[str, ...], wait: bool) -> int:
    """Fill the caches of nodes with what is READY on the mirror. It may be evicted there like anything else.

    A source means what it was last mirrored as; one without a revision its default, or else the newest of any. The exit
    code is 1 when a node failed or is not reachable, and 4 when the mirror does not know what, or where to.

    \b
    Example: bdn-admin prefetch hf://org/model --cluster gpu --wait
    Example: bdn-admin prefetch mir_0123456789abcdef01234567 --node gpu-17 --node gpu-18
    """
    request = PrefetchRequest(**{_kind(what): what}, cluster=cluster, nodes=list(nodes))
    check_usage(request)
    async with reachable_mirror(output) as client:
        found = await client.prefetch(request)
        if wait:
            waiting = waiting_for(output, found.id)
            with progress_bar(output, "prefetching") as bar:
                while found.status == "RUNNING":
                    seconds = _LOOK_AGAIN_SECONDS if output.wants_bars else LONGEST_WAIT_SECONDS
                    found = await waiting.ask(partial(client.prefetch_by_id, found.id, seconds))
                    bar.update(sum(node.bytes_from.total for node in found.nodes), _bytes_total(found))
    output.result(found, [*map(_node_line, found.nodes), f"{found.status} ({found.id})"])
    return FAILED if found.status == "FAILED" else DONE


def _kind(what: str) -> str:
    if what.startswith("mir_"):
        return "mirror_id"
    return "manifest" if what.startswith("b3:") else "source"


def _bytes_total(found: Prefetch) -> int | None:
    """None until every node knows its part."""
    sizes = [node.bytes_total for node in found.nodes if node.state not in {"FAILED", "UNREACHABLE"}]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _node_line(node: PrefetchNode) -> str:
    came = node.bytes_from
    sizes = f"{format_size(came.node)} were there, {format_size(came.cluster)} from peers, {format_size(came.mirror)} from the mirror"
    error = f": {node.error.message} [{node.error.code}]" if node.error else ""
    return f"{node.cluster}/{node.node}  {node.state}  {sizes}{error}"
