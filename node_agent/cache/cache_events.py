"""Events about cache decisions: admissions, refusals and evictions, with the facts that decided them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bdn.core.cache.index import CacheIndex, EvictionReason, Holder, Leased, Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError, Fact
from bdn.core.events import Event
from bdn.wire.operation_schema import EvictCommand, Tier
from node_agent.cache.records import Held

Decisions = Sequence[Event]
Decided = Callable[[Decisions], None]
Account = Callable[[Victim], Event]  # says why a victim is evicted


@dataclass(frozen=True)
class CacheEvents:
    """``changed`` is called when manifests come, go, become whole or lose a lease; ``evicted`` with victims and reason.

    ``decided`` records events before the events take effect. It blocks, runs in threads, and raises nothing.
    """

    changed: Callable[[], object]
    evicted: Callable[[EvictionReason, Sequence[Victim]], None]
    decided: Decided = lambda _: None


def admitted(index: CacheIndex, held: Sequence[Held], holder: Holder, budget: int) -> list[Event]:
    ledger = index.ledger
    room = {"budget": budget, "committed": ledger.committed_bytes, "reserved": ledger.reserved_bytes}
    events: list[Event] = []
    for one in held:
        digest, sizes = one.manifest.digest, one.manifest.contents
        lacked = () if index.is_complete(digest) else [one for one in sizes if not ledger.is_committed(one)]
        facts = {"bytes_total": sum(sizes.values()), "bytes_missing": sum(sizes[content] for content in lacked)}
        events.append(about_holder("admitted", digest, holder, facts | room))
    return events


def refused(index: CacheIndex, held: Sequence[Held], holder: Holder, error: BdnError) -> list[Event]:
    """Empty unless ``error`` is about space: any other error fails the stage without a refusal."""
    facts: dict[str, Fact]
    if isinstance(error, CacheTooSmallError):
        facts = {"needed": error.needed_bytes, "free": 0, "leased": 0, "budget": error.budget_bytes}
    elif isinstance(error, CacheFullError):
        facts = {
            "needed": error.needed_bytes,
            "free": error.free_bytes,
            "leased": error.leased_bytes,
            "budget": error.budget_bytes,
            "in_the_way": list(_in_the_way(index, holder)),
            "needed_files": error.needed_files,
            "free_files": error.free_files,
        }
    else:
        return []
    return [about_holder("refused", one.manifest.digest, holder, {"code": error.code, **facts}) for one in held]


def _in_the_way(index: CacheIndex, asking: Holder) -> Iterable[str]:
    """Holders of the manifests that could not be evicted, each once. Jobs of other organisations are not named."""
    holders = [one for manifest in index.leases.leased() for one in index.leases.holders(manifest)]
    for holder in {one.stage_id: one for one in holders if one.stage_id != asking.stage_id}.values():
        is_own = holder.organisation in (None, asking.organisation)
        yield str(holder) if is_own else "a job of another organisation"


def about_holder(kind: str, manifest: Digest, holder: Holder, facts: Mapping[str, Fact]) -> Event:
    """Also for a stage or prefetch that does not hold the manifest yet."""
    facts = {"stage": holder.stage_id, "job": holder.job_id, **facts}
    return Event.of(kind, facts, manifest=manifest, organisation=holder.organisation)


def kept(manifests: Iterable[Digest], error: BdnError) -> list[Event]:
    """Manifests that were recorded as evicted, but could not be deleted."""
    return [Event.of("kept", {"problem": str(error)}, manifest=manifest) for manifest in manifests]


def dropped(manifests: Iterable[Digest], why: str) -> list[Event]:
    return [Event.of("dropped", {"why": why}, manifest=manifest) for manifest in manifests]


def for_room(holder: Holder, newcomers: Sequence[Digest]) -> Account:
    """Victims evicted from the node tier by LRU, to make room for a stage of these manifests."""
    brought = ", ".join(map(str, newcomers))

    def account(victim: Victim) -> Event:
        gone: dict[str, Fact] = {"tier": "node", "bytes": victim.size, "last_used": victim.last_used}
        return about_holder("made_room", victim.manifest, holder, gone | {"newcomer": brought})

    return account


def over_budget(tier: Tier, held: int, budget: int, allowed: int) -> Account:
    def account(victim: Victim) -> Event:
        gone: dict[str, Fact] = {"tier": tier, "bytes": victim.size, "last_used": victim.last_used}
        return Event.of(
            "trimmed", gone | {"held": held, "budget": budget, "allowed": allowed}, manifest=victim.manifest
        )

    return account


@dataclass(frozen=True)
class OnRequest:
    """An eviction by request. ``broken`` are the leases that force ended before the eviction."""

    command: EvictCommand
    tier: Tier
    broken: dict[Digest, tuple[Holder, ...]]

    def __call__(self, victim: Victim) -> Event:
        facts: dict[str, Fact] = {"bytes": victim.size, "last_used": victim.last_used, "forced": self.command.force}
        return self._event("evicted", victim.manifest, self.broken.get(victim.manifest, ()), facts)

    def spared(self, leased: Iterable[Leased]) -> list[Event]:
        return [self._event("eviction_refused", one.manifest, one.holders, {}) for one in leased]

    def _event(self, kind: str, manifest: Digest, holders: Iterable[Holder], facts: dict[str, Fact]) -> Event:
        request: dict[str, Fact] = {
            "tier": self.tier,
            "eviction": self.command.id,
            "asked_by": self.command.asked_by,
            "holders": [str(holder) for holder in holders],
        }
        return Event.of(kind, request | facts, manifest=manifest, organisation=self.command.organisation)
