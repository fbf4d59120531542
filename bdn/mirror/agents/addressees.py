"""Whom an operator's request is for: agents, by the names under which they answer, and the mirror itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from bdn.core.errors import NotFoundError
from bdn.mirror.db.tables import AgentRow
from bdn.wire.operation_schema import Tier

MIRROR: Final = "mirror"  # among the names of those who have not answered; agents' have a slash


class Narrowed(Protocol):
    """A request that may be for one tier, one cluster or one node; null is any."""

    @property
    def tier(self) -> Tier | None:
        """Whose caches, or the mirror's store."""
        ...

    @property
    def cluster(self) -> str | None:
        """Agents of this cluster."""
        ...

    @property
    def node(self) -> str | None:
        """The agent of this node."""
        ...


def name_of(agent: AgentRow) -> str:
    """How an agent is named among those who have not answered."""
    return f"{agent.cluster}/{agent.node}"


def agents_asked(request: Narrowed, agents: Sequence[AgentRow]) -> list[AgentRow]:
    """Those whom it is for. Whatever an agent's role, it may hold chunks from when it had another one.

    Raises:
        NotFoundError: it names a cluster or a node, and no such agent was ever heard of.
    """
    found = [agent for agent in agents if request.tier != "mirror" and _is_there(request, agent)]
    if not found and _names_agents(request):
        raise NotFoundError(f"an agent of {request.cluster or 'any cluster'}, {request.node or 'any node'}")
    return found


def asks_mirror(request: Narrowed) -> bool:
    """Whether the mirror's own store is meant, too."""
    return request.tier == "mirror" or (request.tier is None and not _names_agents(request))


def _is_there(request: Narrowed, agent: AgentRow) -> bool:
    return request.cluster in (None, agent.cluster) and request.node in (None, agent.node)


def _names_agents(request: Narrowed) -> bool:
    return request.cluster is not None or request.node is not None
