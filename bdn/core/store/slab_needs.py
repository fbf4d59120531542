"""Which slabs an eviction takes: those that no content which stays needs any more.

A content needs a slab for the scope in which it was packed: its upstream's identity must find it where that scope's
organisation may read. It does not, when it is whole by itself or lies in another slab that the same scope may read. Without
that rule a file which every repository has, such as a licence, would keep the slabs of all of them. What is damaged stands in
for nothing, and is needed all the same where nothing stands in for it: it may be repaired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

from bdn.core.store.scope import PUBLIC


class SlabNeeds:
    """Slabs, what lies in them, and what has gone. Names are whatever the caller uses.

    Before it is asked it is told: ``add_slab`` of every slab that holds a content which may go, ``add_slice`` of everything
    in these slabs and of every other slice of those contents, ``add_scope`` and ``add_damaged`` of every slab named so far,
    ``add_whole``.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._scopes: defaultdict[str, set[str]] = defaultdict(set)
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._slabs: defaultdict[str, set[str]] = defaultdict(set)
        self._damaged: set[str] = set()
        self._whole: set[str] = set()
        self._gone: set[str] = set()  # slabs and contents

    # --- what there is ---

    def add_slab(self, slab: str, size: int) -> None:
        """A slab of ``size`` bytes."""
        self._sizes[slab] = size

    def add_scope(self, slab: str, scope: str) -> None:
        """Who may read it as a whole."""
        self._scopes[slab].add(scope)

    def add_damaged(self, slab: str) -> None:
        """The store does not hold it as its name says."""
        self._damaged.add(slab)

    def add_slice(self, content: str, slab: str) -> None:
        """The content lies in the slab."""
        if content not in self._gone and slab not in self._gone:
            self._inside[slab].add(content)
            self._slabs[content].add(slab)

    def add_whole(self, content: str) -> None:
        """The content has chunks of its own as well, none of them damaged."""
        self._whole.add(content)

    def knows(self, slab: str) -> bool:
        """Whether the slab was added."""
        return slab in self._sizes

    # --- what goes ---

    def going(self, contents: Collection[str]) -> list[str]:
        """The slabs that would go with these contents. Changes nothing."""
        leaving = frozenset(contents)
        touched = sorted({slab for content in leaving for slab in self._slabs.get(content, ())})
        dropped: set[str] = set()
        for slab in touched:
            staying = self._inside[slab] - leaving
            if not any(self._needs(content, slab, dropped) for content in staying):
                dropped.add(slab)
        return [slab for slab in touched if slab in dropped]

    def take(self, contents: Collection[str]) -> list[str]:
        """These contents go; returns the slabs that go with them."""
        dropped = self.going(contents)
        self._gone.update(contents, dropped)
        for content in contents:
            for slab in self._slabs.pop(content, ()):
                self._inside[slab].discard(content)
        for slab in dropped:
            for content in self._inside.pop(slab, ()):
                self._slabs[content].discard(slab)
        return dropped

    def size(self, slabs: Iterable[str]) -> int:
        """The bytes of these slabs together."""
        return sum(self._sizes[slab] for slab in slabs)

    def _needs(self, content: str, slab: str, dropped: AbstractSet[str]) -> bool:
        if content in self._whole:
            return False
        others = [self._scopes[other] for other in self._slabs[content] - self._damaged - dropped if other != slab]
        return not all(
            any(scope in readable or PUBLIC in readable for readable in others) for scope in self._scopes[slab]
        )
