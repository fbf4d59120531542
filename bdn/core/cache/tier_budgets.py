"""How one disk is shared by the two tiers of an agent: every byte of arithmetic about it, and no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

# Of an agent with both roles: a tenth, because most chunks of a cluster lie in nodes' whole files.
_CLUSTER_PART: Final = 10
KEEP_PERCENT: Final = 50  # of what a tier may hold; the operator may say otherwise


@dataclass(frozen=True, slots=True)
class TierBudgets:
    """Bytes that each tier may hold, committed and reserved together."""

    node: int
    cluster: int


NOTHING: Final = TierBudgets(node=0, cluster=0)


def tier_limits(roles: Collection[str], limit: int, cluster_limit: int | None, there: int) -> TierBudgets:
    """The most that each tier may ever hold.

    Args:
        roles: what the agent is: ``node``, ``cluster`` or both. A tier whose role it lacks holds nothing.
        limit: what the operator allows the cache.
        cluster_limit: what the operator allows the cluster tier; None for all of ``limit`` when there is no other tier, and
            otherwise for a tenth of what the cache can have.
        there: what the disk really has for us.
    """
    if "cluster" not in roles:
        return TierBudgets(node=limit, cluster=0)
    if "node" not in roles:
        return TierBudgets(node=0, cluster=limit if cluster_limit is None else cluster_limit)
    tenth = max(0, min(limit, there)) // _CLUSTER_PART
    return TierBudgets(node=limit, cluster=tenth if cluster_limit is None else cluster_limit)


def kept(used: TierBudgets, limits: TierBudgets, disk: int, percent: int) -> TierBudgets:
    """What each tier keeps of the bytes that it uses, however full others make the disk: ``percent`` of what it may hold.

    A limit beyond the ``disk``, in bytes, counts as all of the disk; otherwise such a cache would never give way.
    """
    return TierBudgets(
        node=min(used.node, min(limits.node, disk) * percent // 100),
        cluster=min(used.cluster, min(limits.cluster, disk) * percent // 100),
    )


def share(there: int, limits: TierBudgets, keep: TierBudgets = NOTHING) -> TierBudgets:
    """What each tier may hold now that the disk has ``there`` bytes for both (less than nothing, when others took them).

    The cluster tier's room is set apart, so that the two can reserve without asking each other, and it is the last to
    shrink: a chunk that it holds spares the whole cluster a read of the mirror, a node's file spares that to one node.

    Neither goes below what it is to ``keep``: it then holds more than the disk has for us, evicts no more for others' sake,
    and takes in only as much as it evicts.
    """
    cluster = min(limits.cluster, max(keep.cluster, there - keep.node))
    return TierBudgets(node=min(limits.node, max(keep.node, there - cluster)), cluster=cluster)
