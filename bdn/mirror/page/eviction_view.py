"""An eviction as the page shows it: the plan, its progress, its result, and what can be undone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.core.units import counted, format_size, format_time
from bdn.mirror.page.remedies import Problem, problem_of
from bdn.wire.mirror_schema import HeldManifest
from bdn.wire.operation_schema import EvictedItem, Eviction, EvictionRequest

ITEMS_SHOWN: Final = 100
PLAN_SECONDS: Final = 600.0  # an older plan says little of the holders
_AGENTS_HOLDER: Final = re.compile(r"job (.+) \(stage \w+\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class HeldBy:
    """What holds a manifest. ``job`` is None for a prefetch or a running mirror."""

    text: str
    job: str | None


@dataclass(frozen=True, slots=True)
class ItemLine:
    """``fate``: what happens, or has happened, to one manifest on one tier."""

    place: str
    manifest: str
    source: str | None
    size: str
    fate: str
    holders: tuple[HeldBy, ...]


@dataclass(frozen=True, slots=True)
class EvictionView:
    """A planned (``is_plan``) or real eviction.

    ``typed`` is the text that confirms a plan which takes files away from jobs; None if no job holds them.
    """

    id: str
    is_plan: bool
    is_over: bool
    status: str
    subject: str
    now: str
    later: str | None
    until: str | None
    items: tuple[ItemLine, ...]
    hidden: int
    holders: tuple[HeldBy, ...]
    harm: str
    returns: tuple[str, ...]
    typed: str | None
    can_confirm: bool
    can_undo: bool
    is_undone: bool
    unreachable: tuple[str, ...]
    problem: Problem | None


def eviction_view(eviction: Eviction, held: Mapping[str, HeldManifest], now: float) -> EvictionView:
    """``held``: what the tiers hold now of the eviction's manifests, by manifest."""
    request, going = eviction.request, [item for item in eviction.items if not item.refused]
    shown = sorted(eviction.items, key=lambda item: (not item.holders, item.refused, _where(item)))
    undoable, is_over = restorable(eviction, now), eviction.status != "RUNNING"
    later, until = eviction.bytes_kept, eviction.kept_until
    back = [one for one in undoable if (found := held.get(one)) is not None and found.mirror]
    return EvictionView(
        id=eviction.id,
        is_plan=request.dry_run,
        is_over=is_over,
        status=eviction.status,
        subject=_subject(request, eviction.items),
        now=format_size(eviction.bytes_freed - later),
        later=format_size(later) if later else None,
        until=None if until is None else format_time(until.timestamp()),
        items=tuple(_line(item, is_plan=request.dry_run) for item in shown[:ITEMS_SHOWN]),
        hidden=max(0, len(shown) - ITEMS_SHOWN),
        holders=_distinct(going),
        harm=_harm(going),
        returns=tuple(_returns(eviction, held)) if request.dry_run else (),
        typed=_subject(request, eviction.items) if any(item.holders for item in going) else None,
        can_confirm=request.dry_run and is_over and bool(going),
        can_undo=bool(undoable) and len(back) < len(undoable),
        is_undone=bool(undoable) and len(back) == len(undoable),
        unreachable=tuple(eviction.unreachable),
        problem=problem_of(eviction.error),
    )


def plan_request(what: str, *, tier: str | None, node: str | None, is_operator: bool) -> EvictionRequest:
    """The request for a plan. An operator's plan also covers what jobs hold; carrying it out names them first."""
    named = {"manifest" if what.startswith("b3:") else "source": what}
    cluster, slash, name = (node or "").partition("/")
    place = {"cluster": cluster, "node": name} if slash else {"node": node} if node else {}
    wanted = {"tier": tier} if tier else {}
    return EvictionRequest.model_validate({**named, **place, **wanted, "dry_run": True, "force": is_operator})


def confirmed(plan: Eviction, typed: str, now: float) -> EvictionRequest:
    """The request that carries a plan out. Force is used only against holders that the plan named.

    Raises ``InvalidRequestError`` if the plan is not one, has not ended, is too old, or is not confirmed.
    """
    if not plan.request.dry_run:
        raise InvalidRequestError(f"{plan.id} is not a plan; plan the eviction again")
    if plan.completed_at is None:
        raise InvalidRequestError(f"plan {plan.id} is not complete yet; wait until every node has answered")
    if now - plan.completed_at.timestamp() > PLAN_SECONDS:
        raise InvalidRequestError(f"plan {plan.id} is older than 10 minutes; plan the eviction again")
    is_held = any(item.holders for item in plan.items if not item.refused)
    wanted = _subject(plan.request, plan.items)
    if is_held and typed.strip() != wanted:
        raise InvalidRequestError(f"jobs use it: type {wanted} to evict it all the same; nothing was evicted")
    return plan.request.model_copy(update={"dry_run": False, "force": is_held, "plan": plan.id if is_held else None})


def restorable(eviction: Eviction, now: float) -> list[str]:
    """The manifests that the eviction took from the mirror and that can be restored."""
    if eviction.request.dry_run:
        return []
    found = [item for item in eviction.items if item.tier == "mirror" and _is_later(item.restorable_until, now)]
    return list(dict.fromkeys(item.manifest for item in found if not item.refused))


def _is_later(moment: datetime | None, now: float) -> bool:
    return moment is not None and moment.timestamp() > now


def _subject(request: EvictionRequest, items: Sequence[EvictedItem]) -> str:
    """The source, or the manifest if it has none."""
    if request.source is not None:
        return request.source
    if request.manifest is not None:
        return next((item.sources[0] for item in items if item.sources), request.manifest)
    if request.job is not None:
        return f"what job {request.job} staged"
    return "everything" if request.all else f"the least recently used {format_size(request.lru_bytes or 0)}"


def _line(item: EvictedItem, *, is_plan: bool) -> ItemLine:
    fate = "stays: in use" if item.refused else "would be evicted" if is_plan else "evicted"
    source = item.sources[0] if item.sources else None
    size = "" if item.refused and not item.bytes else format_size(item.bytes)
    holders = tuple(_holder(text, item) for text in item.holders)
    return ItemLine(_where(item), item.manifest, source, size, fate, holders)


def _where(item: EvictedItem) -> str:
    if item.tier == "mirror":
        return "the mirror"
    place = f"{item.cluster}/{item.node}"
    return f"{place}, chunks for its cluster" if item.tier == "cluster" else place


def _holder(text: str, item: EvictedItem) -> HeldBy:
    """Agents write ``job JOB (stage STAGE)``, the mirror ``JOB on NODE`` or ``mirror MIRROR``."""
    if item.tier == "mirror":
        job, on, _ = text.rpartition(" on ")
        return HeldBy(f"job {text}", job) if on else HeldBy(text, None)
    found = _AGENTS_HOLDER.fullmatch(text)
    job = found[1] if found else ""
    return HeldBy(f"job {job} on {item.node}", job) if job and job != "prefetch" else HeldBy(text, None)


def _distinct(items: Sequence[EvictedItem]) -> tuple[HeldBy, ...]:
    return tuple(dict.fromkeys(_holder(text, item) for item in items for text in item.holders))


def _harm(items: Sequence[EvictedItem]) -> str:
    """What the jobs that use the content lose."""
    if any(item.holders and item.tier != "mirror" for item in items):
        return "They lose the files on these nodes, and fail when they open them."
    return "They keep the files that their nodes hold, and cannot fetch missing ones from the mirror."


def _returns(eviction: Eviction, held: Mapping[str, HeldManifest]) -> list[str]:
    """For each way that the content can come back, one sentence."""
    going = [item for item in eviction.items if not item.refused]
    from_mirror = {item.manifest for item in going if item.tier == "mirror"}
    stays = {name for name, one in held.items() if one.mirror} - from_mirror
    sentences = []
    if cached := [item for item in going if item.tier != "mirror"]:
        near = sum(item.bytes for item in cached if item.manifest in stays)
        far = sum(item.bytes for item in cached if item.manifest not in stays)
        if near:
            sentences.append(f"A stage that needs it again fetches {format_size(near)} from the cluster or the mirror.")
        if far:
            sentences.append(
                f"{format_size(far)} on nodes is not on the mirror afterwards: mirror it again before a stage needs it."
            )
    if from_mirror:
        until = eviction.kept_until
        undo = "" if until is None else f"It can be restored until {format_time(until.timestamp())}. "
        sources = [source for item in going if item.tier == "mirror" for source in item.sources[:1]]
        sentences.append(undo + _upstream(sources, was_restorable=bool(undo)))
    return sentences


def _upstream(sources: Sequence[str], *, was_restorable: bool) -> str:
    after = "After that" if was_restorable else "Then"
    pushed = sum(source.startswith("bt://") for source in sources)
    if pushed:
        return f"{after} {counted(pushed, 'checkpoint')} without an upstream {'is' if pushed == 1 else 'are'} lost for good."
    return f"{after} its bytes have to come from its upstream again."
