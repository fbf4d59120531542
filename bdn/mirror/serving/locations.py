"""Signed addresses in the store's bucket for agents, under the same rules as the data plane."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from bdn.core.chunk import Digest
from bdn.core.store import LocatableStore
from bdn.mirror.access.access import Access
from bdn.mirror.chunks.damages import Damages
from bdn.wire.location_schema import ChunkLocation, Delivery, Locations, LocationsRequest

_FOREVER_SECONDS = 3600.0  # the reported lifetime of an address that does not expire


@dataclass(frozen=True)
class ChunkLocations:
    """The service behind ``/chunks/locations``. ``store`` is None if the data plane serves all chunks.

    ``on_located`` receives the number of addresses.
    """

    store: LocatableStore | None
    access: Access
    damages: Damages
    clock: Callable[[], float]
    on_located: Callable[[int], object]

    @property
    def delivery(self) -> Delivery:
        return "proxy" if self.store is None else "direct"

    async def of(self, request: LocationsRequest, bearer: str | None) -> Locations:
        """Where the chunks can be read, for callers that may read them from the data plane.

        Raises:
            NotFoundError: the bearer may not read one of the chunks.
            StoreUnavailableError: the store cannot sign addresses now.
        """
        digests = [Digest.parse(name) for name in dict.fromkeys(request.digests)]
        await self.access.check_chunks(bearer, digests, Digest.parse(request.manifest))
        if self.store is None:
            return Locations(delivery=self.delivery)
        damaged = await self.damages.reasons(digests)
        sound = [digest for digest in digests if digest not in damaged]
        found = await asyncio.to_thread(self.store.locate, sound)
        now = self.clock()
        self.on_located(len(sound))
        return Locations(
            delivery=self.delivery,
            items=[
                ChunkLocation(
                    digest=str(digest),
                    url=location.url,
                    headers=dict(location.headers),
                    expires_in_seconds=max(0.0, min((location.expires_at or inf) - now, _FOREVER_SECONDS)),
                )
                for digest, location in zip(sound, found, strict=True)
            ],
        )
