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
from node_agent.crew import in_thread
from node_agent.records import Held, ManifestRecords

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Catalogue:
    """What a grant's manifests are. The mirror is asked only for what this disk does not know."""

    records: ManifestRecords
    client: MirrorClient
    policy: RetryPolicy

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
        """The manifest with its layout.

        When content is missing, the layout is asked for again, because it says on which port the mirror serves chunks
        now; if the mirror does not give it, the one on this disk is used.

        Raises:
            BdnError: it is not here, and the mirror did not give it.
        """
        manifest = await in_thread(self.records.load, digest)
        layout = await in_thread(self.records.load_layout, digest)
        is_recorded = manifest is not None and layout is not None
        if manifest is None:
            manifest = await self._persist(lambda: self.client.manifest(digest, bearer))
        if layout is None or not is_complete:
            try:
                layout, _ = await self._persist(lambda: self.client.layout(digest, bearer))
                is_recorded = False
            except BdnError:
                if layout is None and not is_complete:
                    raise
        return Held(manifest, layout, is_recorded)

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
