"""What a tier tells those who want to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.cache_index import EvictionReason


@dataclass(frozen=True)
class CacheEvents:
    """Who wants to know: ``changed`` when manifests come, go, become whole or are let go of, ``evicted`` how many and why."""

    changed: Callable[[], object]
    evicted: Callable[[EvictionReason, int], None]
