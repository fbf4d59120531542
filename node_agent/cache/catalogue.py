"""Manifests and layouts: from this disk when they are here, otherwise from the mirror."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.retry import RetryPolicy
from bdn.wire.client import MirrorClient
from node_agent.cache.records import Held, ManifestRecords
from node_agent.crew import in_thread

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Catalogue:
    """What a grant's manifests are. The mirror is asked only for what this disk does not know."""

    records: ManifestRecords
    client: MirrorClient
    policy: RetryPolicy

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
        """The manifest, and its layout unless everything is here.

        The layout is asked for again although it may be on this disk, because it says on which port the mirror serves
        chunks now; if the mirror does not give it, the one on this disk is used.

        Raises:
            BdnError: it is not here, and the mirror did not give it.
        """
        manifest = await in_thread(self.records.load, digest)
        if manifest is None:
            manifest = await self._persist(lambda: self.client.manifest(digest, bearer))
        if is_complete:
            return Held(manifest, None)
        try:
            layout = await self._persist(lambda: self.client.layout(digest, bearer))
        except BdnError:
            known = await in_thread(self.records.load_layout, digest)
            if known is None:
                raise
            layout = known
        return Held(manifest, layout)

    async def _persist(self, ask: Callable[[], Awaitable[_Result]]) -> _Result:
        """Ask again after failures that may pass: a mirror that restarts shall not fail a job."""
        failures = 0
        while True:
            try:
                return await ask()
            except BdnError as error:
                failures += 1
                delay = self.policy.delay(failures, error, random.random())  # noqa: S311 - jitter, not a secret
                if delay is None:
                    raise
            await asyncio.sleep(delay)
