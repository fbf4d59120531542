"""Why a manifest is, or is not, where it is: read off what was decided about it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bdn.core.events.caches import Left
from bdn.core.events.decision import Recorded, when


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the decisions at one place say about a manifest: whether it is there, and the decision that says so.

    ``kept_out`` is the last time since when it was not let in.
    """

    is_here: bool
    because: Recorded | None = None
    kept_out: Recorded | None = None


def verdict(story: Iterable[Recorded], tier: str = "node") -> Verdict:
    """Read the decisions of one place about one manifest, oldest first.

    A refusal says nothing about what was there before: who asks for more of a manifest that is held incompletely, and is
    refused, finds it as it was.
    """
    found = Verdict(is_here=False)
    for one in story:
        decision = one.decision
        if isinstance(decision, Left) and decision.tier != tier:
            continue
        if decision.presence == "here":
            found = Verdict(is_here=True, because=one)
        elif decision.presence == "absent":
            found = Verdict(is_here=False, because=one)
        elif decision.presence == "kept out":
            found = Verdict(found.is_here, found.because, kept_out=one)
    return found


def explanation(story: Sequence[Recorded], place: str, *, is_here: bool) -> str:
    """One sentence: it is, or is not, cached there, and why.

    Args:
        story: the decisions of that place about the manifest, oldest first.
        is_here: what is known to be so, from what the place reports that it holds.
    """
    said = verdict(story)
    state = "is cached" if is_here else "is not cached"
    opening = f"{state} on {place}"
    if not is_here and said.kept_out is not None:
        return f"{opening}: at {when(said.kept_out.at)} it {said.kept_out.decision}"
    if said.because is None:
        return (
            f"{opening}: nothing on record says that it ever came"
            if not is_here
            else f"{opening}: it came before the record"
        )
    if said.is_here != is_here:
        return (
            f"{opening}; the last that is on record is another: at {when(said.because.at)} it {said.because.decision}"
        )
    return f"{opening} because at {when(said.because.at)} it {said.because.decision}"
