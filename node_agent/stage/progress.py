"""How far a stage is: bytes by mount and by the tier that they came from, and how fast they come."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Final

from bdn.core.digest import Digest
from bdn.core.manifest import Manifest
from bdn.wire.eviction_schema import Tier
from bdn.wire.stage_schema import BytesFrom

_WINDOW_SECONDS: Final = 5.0


class StageProgress:
    """Counts what arrives. Content is fetched once; under every further path and mount it comes from this node."""

    def __init__(self, manifests: Sequence[Manifest], missing: Collection[Digest]) -> None:
        self._paths = [
            Counter(entry.digest for entry in manifest.files if entry.digest in missing) for manifest in manifests
        ]
        self._first = {digest: mount for mount, paths in reversed([*enumerate(self._paths)]) for digest in paths}
        self._mounts: list[Counter[Tier]] = []
        for manifest, paths in zip(manifests, self._paths, strict=True):
            to_come = sum(manifest.contents[digest] * count for digest, count in paths.items())
            self._mounts.append(Counter({"node": manifest.bytes_total - to_come}))
        self._coming: dict[Digest, Counter[Tier]] = {}

    def report(self, content: Digest, tier: Tier, size: int) -> None:
        """Bytes of a content that is coming."""
        self._coming.setdefault(content, Counter())[tier] += size
        self._mounts[self._first[content]][tier] += size

    def restart(self, content: Digest) -> None:
        """What was reported of it is void."""
        self._mounts[self._first[content]] -= self._coming.pop(content, Counter())

    def finish(self, content: Digest, size: int) -> None:
        """It is whole; its other paths have it, too."""
        coming = self._coming.pop(content, None)
        self._mounts[self._first[content]]["node"] -= sum(coming.values()) if coming else 0
        for tiers, paths in zip(self._mounts, self._paths, strict=True):
            tiers["node"] += size * paths[content]

    def bytes_from(self, mount: int) -> BytesFrom:
        """The bytes of one mount so far."""
        tiers = self._mounts[mount]
        return BytesFrom(node=tiers["node"], cluster=tiers["cluster"], mirror=tiers["mirror"])


class Rate:
    """Bytes per second over the last seconds. Times are monotonic and given by the caller."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self.total = 0

    def add(self, size: int, now: float) -> None:
        """Bytes that came at ``now``."""
        if self._began is None:
            self._began = now
        self.total += size
        self._samples.append((now, size))
        self._drop_old(now)

    def per_second(self, now: float) -> float | None:
        """The rate now; None before the first bytes."""
        if self._began is None:
            return None
        self._drop_old(now)
        span = min(_WINDOW_SECONDS, now - self._began)
        return sum(size for _, size in self._samples) / max(span, 0.1)

    def _drop_old(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - _WINDOW_SECONDS:
            self._samples.popleft()


def bytes_done(came: BytesFrom) -> int:
    """All tiers together."""
    return came.node + came.cluster + came.mirror
