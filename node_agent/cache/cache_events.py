"""What a tier tells those who want to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bdn.core.cache.index import EvictionReason
from bdn.core.events.decision import Decision

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
