"""What each manifest of an eviction frees: the bytes that will be collected because nobody may read it any more."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field

from bdn.core.store.slabs import SlabNeeds
from bdn.mirror.db import removal, tombstones
from bdn.mirror.db.database import ReadSession


@dataclass
class EvictionWeights:
    """Counts down, manifest by manifest, who still needs each content and each slab. The dead need nothing.

    A content's own bytes are freed with the last manifest that names it, a slab's when the last content goes that needs
    it. So the last of several manifests that share a slab frees all of it, and the others nothing.
    """

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
        gone = self._needs.going(unnamed) if is_kept else self._needs.take(unnamed)
        return freed + self._needs.size(gone)

    async def _look_at_slabs(self, session: ReadSession, manifest: str) -> None:
        slabs = [slab for slab in await removal.slabs_of(session, manifest) if not self._needs.knows(slab)]
        facts = await removal.slab_facts(session, slabs)
        facts.tell(self._needs)
        inside = sorted({content for content, _ in facts.slices})
        living = await tombstones.living(session, inside)
        self._needs.take([content for content in inside if content not in living])
