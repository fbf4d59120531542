"""A file that is not here any more comes again as any stage would bring it, for nobody in particular."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.eviction_schema import Tier
from node_agent.background_tasks import to_the_end
from node_agent.fill.provision import FillRequest, Provision
from node_agent.scrub.rights import Rights

_HOLDER: Final = Holder("scrub", "scrub")


@dataclass(frozen=True)
class Refill:
    """Its manifest is leased while it comes, and no longer. One at a time."""

    provision: Provision
    rights: Rights

    async def bring(self, content: Digest) -> None:
        """Fill it, for a manifest that lacks nothing else: of all the others nobody wants the rest now.

        Raises:
            NotFoundError: there is no such manifest. The next stage brings the content with all that its manifest lacks.
            BdnError: it cannot be had.
        """
        index = self.provision.cache.index
        named = [manifest for manifest in index.named_by(content) if index.is_complete_but_for(manifest, content)]
        if not named:
            raise NotFoundError(f"a manifest here that lacks {content} and nothing else")
        manifest, grant = self.rights.find(named)
        index.leases.take(manifest, _HOLDER)  # at once: evicted before it is admitted, all of it would come again
        try:
            await self.provision.run(FillRequest([manifest], grant, _HOLDER, TrafficClass.SCRUB, lambda *_: _Nobody()))
        finally:
            await to_the_end(self.provision.cache.leave(_HOLDER.stage_id))


class _Nobody:
    """Watches nothing."""

    def report(self, file: Digest, tier: Tier, size: int) -> None:
        pass

    def restart(self, file: Digest) -> None:
        pass

    def finish(self, file: Digest, size: int) -> None:
        pass
