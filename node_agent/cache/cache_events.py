"""What the tiers decide, as events: who was admitted and at whose cost, and what else was evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bdn.core.cache.index import CacheIndex, EvictionReason, Leased, Victim
from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError
from bdn.core.events.caches import Dropped, EvictedOnRequest, EvictionRefused, Kept, MadeRoom, Trimmed
from bdn.core.events.decision import Decision
from bdn.core.events.stages import Admitted, Refused
from bdn.wire.eviction_schema import EvictCommand, Tier
from node_agent.cache.records import Held

Decided = Callable[[Sequence[Decision]], None]


def _nobody(_: Sequence[Decision]) -> None:
    """A tier that stands alone keeps no journal."""


@dataclass(frozen=True)
class CacheEvents:
    """Who wants to know: ``changed`` when manifests come, go, become whole or are let go of, ``evicted`` how many and why.

    ``decided`` writes down what was decided, before it is done. It blocks, is called in threads, and raises nothing.
    """

    changed: Callable[[], object]
    evicted: Callable[[EvictionReason, int], None]
    decided: Decided = _nobody


Account = Callable[[Victim, float], Decision]  # why this victim goes, given its last use


def admitted(index: CacheIndex, held: Sequence[Held], holder: Holder, budget: int) -> list[Decision]:
    """One event for each manifest of a stage that was let in just now."""
    ledger = index.ledger
    return [
        Admitted(
            manifest=str(one.manifest.digest),
            organisation=holder.organisation,
            stage=holder.stage_id,
            job=holder.job_id,
            bytes_total=sum(one.manifest.contents.values()),
            bytes_missing=0 if index.is_complete(one.manifest.digest) else _missing(index, one.manifest.contents),
            budget=budget,
            committed=ledger.committed_bytes,
            reserved=ledger.reserved_bytes,
        )
        for one in held
    ]


def _missing(index: CacheIndex, contents: Mapping[Digest, int]) -> int:
    return sum(size for content, size in contents.items() if not index.ledger.is_committed(content))


def refused(index: CacheIndex, held: Sequence[Held], holder: Holder, error: BdnError) -> list[Decision]:
    """One event for each manifest of a stage that was not let in. For another error there is none: the stage has failed."""
    if isinstance(error, CacheTooSmallError):
        needed, free, leased, budget = error.needed_bytes, 0, 0, error.budget_bytes
    elif isinstance(error, CacheFullError):
        needed, free, leased, budget = error.needed_bytes, error.free_bytes, error.leased_bytes, error.budget_bytes
    else:
        return []
    in_the_way = tuple(_in_the_way(index, holder)) if isinstance(error, CacheFullError) else ()
    return [
        Refused(
            manifest=str(one.manifest.digest),
            organisation=holder.organisation,
            stage=holder.stage_id,
            job=holder.job_id,
            code=error.code,
            needed=needed,
            free=free,
            leased=leased,
            budget=budget,
            in_the_way=in_the_way,
            needed_files=error.needed_files if isinstance(error, CacheFullError) else None,
            free_files=error.free_files if isinstance(error, CacheFullError) else None,
        )
        for one in held
    ]


def _in_the_way(index: CacheIndex, asking: Holder) -> Iterable[str]:
    """Who holds what could not be evicted, each once; of other organisations no names are told."""
    holders = [one for manifest in index.leases.leased() for one in index.leases.holders(manifest)]
    for holder in {one.stage_id: one for one in holders if one.stage_id != asking.stage_id}.values():
        is_own = holder.organisation in (None, asking.organisation)
        yield str(holder) if is_own else "a job of another organisation"


def kept(manifests: Iterable[Digest], error: BdnError) -> list[Decision]:
    """Written down as evicted, and still here."""
    return [Kept(manifest=str(manifest), problem=str(error)) for manifest in manifests]


def dropped(manifests: Iterable[Digest], why: str) -> list[Decision]:
    """Manifests of which nothing is kept."""
    return [Dropped(manifest=str(manifest), why=why) for manifest in manifests]


def for_room(holder: Holder, newcomers: Sequence[Held]) -> Account:
    """Victims that go as the least recently used, for a stage."""

    def account(victim: Victim, last_used: float) -> Decision:
        return MadeRoom(
            manifest=str(victim.manifest),
            organisation=holder.organisation,
            tier="node",
            bytes=victim.size,
            last_used=last_used,
            stage=holder.stage_id,
            job=holder.job_id,
            newcomer=", ".join(str(one.manifest.digest) for one in newcomers),
        )

    return account


def over_budget(tier: Tier, held: int, budget: int, allowed: int) -> Account:
    """Victims that go because the tier holds more than it may."""

    def account(victim: Victim, last_used: float) -> Decision:
        return Trimmed(
            manifest=str(victim.manifest),
            tier=tier,
            bytes=victim.size,
            last_used=last_used,
            held=held,
            budget=budget,
            allowed=allowed,
        )

    return account


@dataclass(frozen=True)
class OnRequest:
    """An eviction that somebody asked for: what goes, and what is spared. ``broken`` are leases that force has ended before."""

    command: EvictCommand
    tier: Tier
    broken: dict[Digest, tuple[Holder, ...]]

    def __call__(self, victim: Victim, last_used: float) -> Decision:
        """Why this victim goes."""
        return EvictedOnRequest(
            manifest=str(victim.manifest),
            organisation=self.command.organisation,
            tier=self.tier,
            bytes=victim.size,
            last_used=last_used,
            eviction=self.command.id,
            asked_by=self.command.asked_by,
            forced=self.command.force,
            holders=tuple(map(str, self.broken.get(victim.manifest, ()))),
        )

    def spared(self, leased: Iterable[Leased]) -> list[Decision]:
        """What was left alone."""
        return [
            EvictionRefused(
                manifest=str(one.manifest),
                organisation=self.command.organisation,
                tier=self.tier,
                eviction=self.command.id,
                asked_by=self.command.asked_by,
                holders=tuple(map(str, one.holders)),
            )
            for one in leased
        ]
