"""Manifests and layouts: from this disk when they are here, otherwise from the mirror or, while that is silent, from peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.manifest import Manifest
from bdn.core.pace.retry import RetryPolicy
from bdn.net.client import MirrorClient
from bdn.wire.errors import ServiceUnreachableError
from bdn.wire.layout_form import Layout
from node_agent.background_tasks import in_thread
from node_agent.cache.records import Held, ManifestRecords

_Result = TypeVar("_Result")


class PeerDocumentSource(Protocol):
    """Others who may hold the documents. None: nobody has them."""

    async def manifest(self, digest: Digest, bearer: str) -> Manifest | None:
        """The manifest."""
        ...

    async def layout(self, manifest: Manifest, bearer: str) -> Layout | None:
        """Where its bytes lie."""
        ...


@dataclass(frozen=True)
class Catalogue:
    """What a grant's manifests are. The mirror is asked only for what this disk does not know.

    ``answer_seconds`` is what it has for an answer: before others have been asked, and afterwards.
    """

    records: ManifestRecords
    client: MirrorClient
    peers: PeerDocumentSource
    policy: RetryPolicy
    answer_seconds: tuple[float, float]

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
        """The manifest, and its layout unless everything is here.

        The layout is asked for again although it may be on this disk, because it says on which port the mirror serves
        chunks now; if the mirror does not give it, the one on this disk is used.

        Raises:
            BdnError: it is not here, and neither the mirror nor a peer gave it.
        """
        manifest = await in_thread(self.records.load, digest)
        if manifest is None:
            manifest = await self._persist(
                lambda: self.client.manifest(digest, bearer), lambda: self.peers.manifest(digest, bearer)
            )
        if is_complete:
            return Held(manifest, None)
        return Held(manifest, await self._layout(manifest, bearer))

    async def _layout(self, manifest: Manifest, bearer: str) -> Layout:
        digest = manifest.digest

        async def instead() -> Layout | None:
            return await in_thread(self.records.load_layout, digest) or await self.peers.layout(manifest, bearer)

        try:
            return await self._persist(lambda: self.client.layout(digest, bearer), instead)
        except BdnError:
            known = await in_thread(self.records.load_layout, digest)
            if known is None:
                raise
            return known

    async def _persist(
        self, ask: Callable[[], Awaitable[_Result]], instead: Callable[[], Awaitable[_Result | None]]
    ) -> _Result:
        """Ask the mirror; after a failure that may pass, others; then the mirror again: one that restarts shall not fail a job.

        A mirror that says nothing at all costs a stage little where others know the answer, and has its full time for a long
        answer where nobody does.
        """
        failures = 0
        while True:
            try:
                return await self._ask(ask, self.answer_seconds[failures > 0])
            except BdnError as error:
                failures += 1
                if error.transient and (found := await instead()) is not None:
                    return found
                delay = self.policy.delay(failures, error, random.random())  # noqa: S311 - jitter, not a secret
                if delay is None:
                    raise
            await asyncio.sleep(delay)

    async def _ask(self, ask: Callable[[], Awaitable[_Result]], seconds: float) -> _Result:
        try:
            async with asyncio.timeout(seconds):
                return await ask()
        except TimeoutError:
            raise ServiceUnreachableError(self.client.address, f"silent for {seconds:g} s") from None
