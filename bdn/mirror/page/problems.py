"""What is wrong, where, and what to do: rules over the documents of the API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from bdn.core.units import format_size, format_time
from bdn.mirror.page.remedies import REMEDIES
from bdn.mirror.page.rendering import path_of, percent
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import Mirror

Kind = Literal["bad", "warn", "good"]
_RECENT: Final = timedelta(days=1)  # for which a failed mirror is a problem
_PENDING: Final = timedelta(minutes=2)  # after which a mirror should have begun


@dataclass(frozen=True, slots=True)
class KnownProblem:
    kind: Kind
    title: str
    what: str
    remedy: str
    name: str = ""  # of the node or source, and the address of its view
    place: str = ""


@dataclass(frozen=True, slots=True)
class NodeState:
    """An agent in one row: ``kind`` is the worst of its problems."""

    cluster: str
    name: str
    kind: Kind
    state: str
    held: int
    budget: int
    manifests: int
    is_alive: bool

    @property
    def percent(self) -> int:
        return percent(self.held, self.budget)

    @classmethod
    def of(cls, agent: AgentDocument) -> "NodeState":
        kinds = {problem.kind for problem in problems_of(agent)}
        return cls(
            agent.cluster,
            agent.node,
            "bad" if "bad" in kinds else "warn" if kinds else "good",
            _state(agent),
            sum(use.committed + use.reserved for use in agent.tiers.values()),
            sum(use.budget for use in agent.tiers.values()),
            agent.manifests,
            agent.alive,
        )


def _state(agent: AgentDocument) -> str:
    if agent.left_at is not None:
        return "left"
    if not agent.alive:
        return "dead"
    return "disputed" if agent.disputed else "alive"


def problems_of(agent: AgentDocument) -> Iterator[KnownProblem]:
    """The problems of one agent, the worst first. An agent that announced its departure has none."""
    if agent.left_at is not None:
        return
    place = {"name": agent.node, "place": path_of("node", cluster=agent.cluster, node=agent.node)}
    since = format_time(agent.last_heartbeat.timestamp())
    unsynced = format_size(agent.unsynced_bytes)
    if not agent.alive:
        if agent.unsynced_bytes:
            what = f"{unsynced} of checkpoints are on this node alone, and its last heartbeat was at {since}."
            remedy = "Bring the node back before you replace it: the agent pushes them when it starts."
            yield KnownProblem("bad", "Unsynced checkpoints on a dead node", what, remedy, **place)
        what = f"The last heartbeat was at {since}."
        remedy = "Look at the agent's log on the node. If the node is gone for good: bdn-admin agents rm NODE."
        yield KnownProblem("bad", "Dead agent", what, remedy, **place)
        return
    if agent.disputed:
        what = "Two agents report under this name."
        yield KnownProblem(
            "bad", "Disputed name", what, "Set another BDN_AGENT_NODE for one of them, and restart it.", **place
        )
    for tier, use in agent.tiers.items():
        if use.problem:
            remedy = "Repair or replace the disk; until then the tier admits nothing new."
            yield KnownProblem("bad", f"Tier {tier} has failed", use.problem, remedy, **place)
        if use.pressed > 0:
            what = f"Other data takes {format_size(use.pressed)} of the budget of {format_size(use.budget)}."
            remedy = "Delete what other programs left on this disk, or lower BDN_AGENT_CACHE_BYTES."
            yield KnownProblem("warn", f"Tier {tier} is pressed", what, remedy, **place)
    if agent.unsynced_bytes:
        what = f"{unsynced} of checkpoints are on this node alone."
        remedy = "The agent pushes them by itself. If the number does not fall, look for errors of pushes in its log."
        yield KnownProblem("warn", "Unsynced checkpoints", what, remedy, **place)


def problems_of_mirrors(mirrors: Sequence[Mirror], now: datetime) -> Iterator[KnownProblem]:
    """Mirrors that failed within a day and were not requested again since, and mirrors that no worker has begun."""
    later: set[tuple[str, ...]] = set()
    for mirror in sorted(mirrors, key=lambda one: one.created_at, reverse=True):
        sources = tuple(source.source for source in mirror.sources)
        place = {"name": sources[0] if sources else mirror.id, "place": path_of("mirror", id=mirror.id)}
        is_recent = now - (mirror.completed_at or mirror.created_at) < _RECENT
        if mirror.status == "FAILED" and sources not in later and is_recent and mirror.error is not None:
            yield KnownProblem("bad", "Failed mirror", mirror.error.message, remedy_of(mirror.error.code), **place)
        if mirror.status == "PENDING" and now - mirror.created_at > _PENDING:
            what = f"It was requested at {format_time(mirror.created_at.timestamp())}, and no worker has begun it."
            remedy = "Start another worker (bdn worker), raise BDN_JOBS, or wait for other mirrors to end."
            yield KnownProblem("warn", "Waiting mirror", what, remedy, **place)
        later.add(sources)


def damage(count: int) -> Iterator[KnownProblem]:
    if count:
        what = f"{count} of the store's chunks are damaged or missing, and are not served."
        remedy = "The scrub repairs them from agents and upstreams. What it cannot repair: bdn-admin verify --all, then mirror it again."
        yield KnownProblem("bad", "Damage in the store", what, remedy)


REMEDY: Final = "Correct what the message names, then try again."


def remedy_of(code: str) -> str:
    """What an operator does about an error of this code, as docs/contract.md has it."""
    return REMEDIES.get(code, REMEDY)
