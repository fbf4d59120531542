"""Which part of a source patterns can select from at all: a listing can be narrowed to it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from bdn.core.source.patterns import Patterns, literal_start

MOST: Final = 16  # each may cost a source a request of its own


def literal_prefixes(patterns: Patterns) -> tuple[str, ...]:
    """Every selected path begins with one of these; ``("",)`` when nothing is known.

    Sorted, none the beginning of another, and at most ``MOST``: of more, neighbours are replaced by what they have in common.
    """
    if not patterns.allow:
        return ("",)
    return common_beginnings(map(literal_start, patterns.allow))


def common_beginnings(texts: Iterable[str]) -> tuple[str, ...]:
    """Every one of these texts begins with one of the answer's, which are as ``literal_prefixes`` says."""
    return _merged(_outermost(texts))


def _outermost(prefixes: Iterable[str]) -> list[str]:
    """Without those that begin with another one. A prefix sorts directly before all that begin with it."""
    outermost: list[str] = []
    for prefix in sorted(prefixes):
        if not outermost or not prefix.startswith(outermost[-1]):
            outermost.append(prefix)
    return outermost


def _merged(prefixes: list[str]) -> tuple[str, ...]:
    """Cut between the neighbours that have least in common; each part becomes what its first and its last share."""
    gaps = range(1, len(prefixes))
    by_kinship = sorted(gaps, key=lambda gap: len(_common(prefixes[gap - 1], prefixes[gap])))
    cuts = [0, *sorted(by_kinship[: MOST - 1]), len(prefixes)]
    return tuple(_outermost(_common(prefixes[start], prefixes[stop - 1]) for start, stop in pairwise(cuts)))


def _common(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
