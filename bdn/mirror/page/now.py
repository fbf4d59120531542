"""The view *Now*: first what is wrong, each with its remedy, then rates and sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from bdn.core.units import format_size
from bdn.mirror.access.callers import Caller
from bdn.mirror.page.parts import Part
from bdn.mirror.page.problems import KnownProblem, damage, problems_of, problems_of_mirrors
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import Mirror
from bdn.wire.shapes import moment

_SHOWN: Final = 50  # problems
_NEWEST: Final = 100  # mirrors of a status that are read
_RUNNING: Final = 1000


@dataclass(frozen=True)
class _NowFacts:
    problems: Sequence[KnownProblem]
    agents: Sequence[AgentDocument]
    sees_agents: bool
    running: Sequence[Mirror]
    has_mirrors: bool


async def _read(sources: Sources, caller: Caller, _: Asked) -> Show:
    async def mirrors(status: str, limit: int) -> list[Mirror]:
        return (await sources.requests.page(caller.organisation, status, None, None, limit, team=caller.team))[0]

    sees_agents = caller.team is None
    agents = await sources.agents.get() if sees_agents else ()
    failed, waiting = await mirrors("FAILED", _NEWEST), await mirrors("PENDING", _NEWEST)
    running = await mirrors("SYNCING", _RUNNING)
    # Each READY mirror costs the signature of a grant; they count where they may have followed a failed one.
    ready = await mirrors("READY", _NEWEST if failed else 1)
    damaged = await sources.damages.count() if sees_agents else 0
    of_mirrors = problems_of_mirrors([*failed, *waiting, *running, *ready], moment(sources.now()))
    problems = [*damage(damaged), *(one for agent in agents for one in problems_of(agent)), *of_mirrors]
    problems.sort(key=lambda one: one.kind != "bad")  # stable: within a kind, by place
    facts = _NowFacts(problems, agents, sees_agents, running, has_mirrors=any([failed, waiting, running, ready]))
    return partial(_show, facts)


def _show(facts: _NowFacts, templates: Templates) -> Iterator[Part]:
    macros = templates.macros("now_parts.html")
    is_empty = not (facts.agents or facts.has_mirrors)
    yield Part(macros.heading())
    shown = facts.problems[:_SHOWN]
    yield Part(macros.problems(shown, len(facts.problems) - len(shown), is_empty))
    yield Part(macros.figures(list(_figures(facts))))


def _figures(facts: _NowFacts) -> Iterator[tuple[str, str]]:
    rate = sum(mirror.bytes_per_second or 0.0 for mirror in facts.running)
    yield "Mirrors at work", str(len(facts.running))
    yield "From upstreams", f"{format_size(round(rate))}/s"
    if not facts.sees_agents:
        return
    alive = [agent for agent in facts.agents if agent.alive]
    uses = [use for agent in alive for use in agent.tiers.values()]
    yield "Agents", f"{len(alive)} of {len(facts.agents)} alive"
    held, budget = sum(use.committed for use in uses), sum(use.budget for use in uses)
    yield "Held on nodes", f"{format_size(held)} of {format_size(budget)}"
    yield "Leased by stages", format_size(sum(use.leased for use in uses))
    yield "Unsynced checkpoints", format_size(sum(agent.unsynced_bytes for agent in facts.agents))


NOW: Final = PageView("now", "Now", "now.html", _read)
