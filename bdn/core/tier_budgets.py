"""How one disk is shared by the two tiers of an agent: every byte of arithmetic about it, and no I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

_CLUSTER_PART: Final = (
    10  # of an agent with both roles: a tenth, because most chunks of a cluster lie in nodes' whole files
)


@dataclass(frozen=True, slots=True)
class TierBudgets:
    """Bytes that each tier may hold, committed and reserved together."""

    node: int
    cluster: int


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
    tenth = min(limit, there) // _CLUSTER_PART
    return TierBudgets(node=limit, cluster=tenth if cluster_limit is None else cluster_limit)


def share(there: int, limits: TierBudgets) -> TierBudgets:
    """What each tier may hold now that the disk has ``there`` bytes for both (less than nothing, when others took them).

    The cluster tier's room is set apart, so that the two can reserve without asking each other, and it is the last to
    shrink: a chunk that it holds spares the whole cluster a read of the mirror, a node's file spares that to one node.
    """
    there = max(0, there)
    cluster = min(limits.cluster, there)
    return TierBudgets(node=min(limits.node, there - cluster), cluster=cluster)
