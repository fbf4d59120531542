"""What each manifest of an eviction frees: the bytes that nothing needs any more once it is gone as well."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field

from bdn.core.slab_needs import SlabNeeds
from bdn.mirror.database import ReadSession
from bdn.mirror.repository import removal


@dataclass
class EvictionWeights:
    """Counts down, manifest by manifest, who still needs each content and each slab.

    A content's own bytes are freed with the last manifest that names it, a slab's when the last content goes that needs
    it. So the last of several manifests that share a slab frees all of it, and the others nothing.
    """

    slabs: list[str] = field(default_factory=list)  # that go
    _names: dict[str, int] = field(default_factory=dict)  # of each content, how many manifests that stay name it
    _needs: SlabNeeds = field(default_factory=SlabNeeds)

    async def take(self, session: ReadSession, manifest: str, *, is_kept: bool) -> int:
        """The bytes that the manifest frees; ``is_kept`` only asks, and takes nothing."""
        names = ChainMap({}, self._names) if is_kept else self._names
        await self._look_at_slabs(session, manifest)
        freed = 0
        unnamed: list[str] = []
        for content, size, manifests in await removal.contents_of(session, manifest):
            names[content] = names.get(content, manifests) - 1
            if not names[content]:
                unnamed.append(content)
                freed += size
        if is_kept:
            return freed + self._needs.size(self._needs.going(unnamed))
        gone = self._needs.take(unnamed)
        self.slabs += gone
        return freed + self._needs.size(gone)

    @property
    def contents(self) -> list[str]:
        """The contents that go, because no manifest that stays names them."""
        return [content for content, left in self._names.items() if left == 0]

    async def _look_at_slabs(self, session: ReadSession, manifest: str) -> None:
        slabs = [slab for slab in await removal.slabs_of(session, manifest) if not self._needs.knows(slab)]
        facts = await removal.slab_facts(session, slabs)
        for slab, size in facts.sizes:
            self._needs.add_slab(slab, size)
        for content, slab in facts.slices:
            self._needs.add_slice(content, slab)
        for slab, scope in facts.scopes:
            self._needs.add_scope(slab, scope)
        for content in facts.whole:
            self._needs.add_whole(content)
