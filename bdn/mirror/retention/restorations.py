"""What was evicted from the mirror and is not collected yet can be had back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.errors import NotFoundError
from bdn.core.events import Event
from bdn.mirror.db import contents, events, mirrors
from bdn.mirror.db.database import Database
from bdn.wire.operation_schema import RestorationRequest, RestoredItem
from bdn.wire.shapes import Items


@dataclass(frozen=True)
class Restorations:
    """The service behind ``/restorations``."""

    database: Database
    clock: Callable[[], float] = time.time

    async def restore(self, request: RestorationRequest, organisation: str) -> Items[RestoredItem]:
        """Let the organisation read it again, all of what was named.

        Raises:
            InvalidRequestError: the selectors do not go together.
            NotFoundError: nothing of that was evicted, or it is collected.
        """
        request.check()
        async with self.database.write() as session:
            # A collection goes first, and then there is nothing to restore, or it waits.
            await mirrors.hold_claims(session)
            named = await mirrors.named_manifests(session, organisation, request.manifest, request.source)
            restored = sorted(await mirrors.restore(session, organisation, named))
            await contents.touch(session, restored, self.clock())
            decided = [
                Event.of("restored", {}, manifest=f"b3:{digest}", organisation=organisation) for digest in restored
            ]
            await events.record(session, decided, self.clock())
            sources = await mirrors.sources_by_manifest(session, organisation, restored)
        if not restored:
            raise NotFoundError(f"{request.manifest or request.source} among what was evicted and is not collected yet")
        return Items[RestoredItem](
            items=[RestoredItem(manifest=f"b3:{digest}", sources=sources.get(digest, [])) for digest in restored]
        )
