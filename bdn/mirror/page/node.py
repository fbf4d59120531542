"""The view *Node*: capacity by tier, stages, what the node holds, its warnings and its recent decisions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bdn.core.chunk import digest_in
from bdn.core.errors import NotFoundError
from bdn.mirror.access.callers import Caller
from bdn.mirror.db.events import Wanted
from bdn.mirror.page.parts import Part
from bdn.mirror.page.problems import NodeState, problems_of
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.access_schema import Role
from bdn.wire.event_schema import EventDocument
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifests
from bdn.wire.stage_schema import JobStage

_HOLDINGS: Final = 100  # on one page
_EVENTS: Final = 20


@dataclass(frozen=True)
class _Held:
    """A manifest on this node, as a row. ``jobs`` are known to operators."""

    sources: Sequence[str]
    manifest: str
    bytes: int
    complete: bool
    jobs: Sequence[str]


@dataclass(frozen=True)
class _NodeFacts:
    agent: AgentDocument
    held: Sequence[_Held]
    after: str
    following: str
    events: Sequence[EventDocument]
    stages: Sequence[JobStage]
    is_operator: bool


async def _read(sources: Sources, caller: Caller, asked: Asked) -> Show:
    caller.of_all_teams()
    cluster, node, after = asked["cluster"], asked["node"], asked["after"]
    agent = next((one for one in await sources.agents.get() if (one.cluster, one.node) == (cluster, node)), None)
    if agent is None:
        raise NotFoundError(f"agent {cluster[:200]}/{node[:200]}")
    before = digest_in(after).hex if after else ""
    found = await sources.names.held(caller.organisation, before, _HOLDINGS, (cluster, node))
    events, _ = await sources.events.page(caller.organisation, Wanted(node=node), None, _EVENTS)
    stages = await sources.job_stages.on_node(caller, cluster, node)
    is_operator = caller.role is Role.OPERATOR
    held = list(_rows(found if is_operator else found.without_holders()))
    ours = [event for event in events if event.cluster == cluster]
    return partial(_show, _NodeFacts(agent, held, after, found.next_cursor or "", ours, stages, is_operator))


def _rows(found: HeldManifests) -> Iterator[_Held]:
    for item in found.items:
        for holding in item.nodes.values():
            sources = item.sources or holding.sources
            size = holding.bytes + holding.cluster_bytes
            yield _Held(sources, item.manifest, size, holding.complete, holding.held_by)


def _show(facts: _NodeFacts, templates: Templates) -> Iterator[Part]:
    macros, agent = templates.macros("node_parts.html"), facts.agent
    yield Part(macros.heading(agent, NodeState.of(agent)))
    yield Part(macros.warnings(list(problems_of(agent))))
    yield Part(macros.tiers(agent.tiers))
    yield Part(macros.stages(facts.stages))
    yield Part(macros.holdings(facts.held, agent, facts.after, facts.following, facts.is_operator))
    yield Part(macros.events(facts.events))


NODE: Final = PageView("node", "Node", "node.html", _read, ("cluster", "node", "after"), is_in_menu=False)
