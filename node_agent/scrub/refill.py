"""A file that is not here any more comes again as any stage would bring it, for nobody in particular."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bdn.core.cache.leases import Holder
from bdn.core.digest import Digest
from bdn.core.pace.rate_limit import TrafficClass
from bdn.wire.eviction_schema import Tier
from node_agent.crew import to_the_end
from node_agent.scrub.rights import Rights
from node_agent.stage.provision import Errand, Provision

_HOLDER: Final = Holder("scrub", "scrub")


@dataclass(frozen=True)
class Refill:
    """Its manifest is leased while it comes, and no longer. One at a time."""

    provision: Provision
    rights: Rights

    async def bring(self, content: Digest) -> None:
        """Fill what a manifest of this content lacks. Raises ``BdnError``."""
        manifest, grant = self.rights.find(self.provision.cache.index.named_by(content))
        try:
            await self.provision.run(Errand([manifest], grant, _HOLDER, TrafficClass.SCRUB, lambda *_: _Nobody()))
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
