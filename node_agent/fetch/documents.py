"""Manifests and layouts: from this disk, else from the mirror or, while that does not answer, from peers."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import BdnError
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.net.client import ContentClient
from bdn.wire.layout_form import Layout
from node_agent.background_tasks import in_thread
from node_agent.cache.records import Held, ManifestRecords
from node_agent.fetch.peers import Members, RingMember

logger = logging.getLogger(__name__)

_Document = TypeVar("_Document")
_ASKED_AT_ONCE: Final = 4
_MANIFEST_SECONDS: Final = 10.0
_MOST_MANIFEST_BYTES: Final = 512 * 1024**2  # of a million files it has 200 MB
_LAYOUT_SECONDS: Final = 60.0  # of a million files it has 300 MB


@dataclass(frozen=True)
class PeerDocuments:
    """Asks the members of the cluster, in an order of chance. Nothing a peer says is believed before it was checked.

    Nor is it read without end: a manifest of more than ``most_manifest_bytes`` only the mirror can give, and of a layout it is known
    how long it may be.
    """

    members: Members
    most_manifest_bytes: int = _MOST_MANIFEST_BYTES

    async def manifest(self, digest: Digest, bearer: str) -> Manifest | None:
        """The manifest, which is what its name says; None when no peer has it for this bearer."""

        async def ask(peer: RingMember) -> Manifest | None:
            most = self.most_manifest_bytes
            return await _ask(peer, lambda client: client.manifest(digest, bearer), _MANIFEST_SECONDS, most)

        peers = self._peers()
        for start in range(0, len(peers), _ASKED_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(peer)) for peer in peers[start : start + _ASKED_AT_ONCE]]
            for one in asked:
                if (manifest := one.result()) is not None:
                    return manifest
        return None

    async def layout(self, manifest: Manifest, bearer: str) -> Layout | None:
        """Where its bytes lie: a layout of each of its contents, of the right size; None when no peer has one."""
        digest, most = manifest.digest, Layout.most_bytes(manifest.contents)
        for peer in self._peers():
            layout = await _ask(peer, lambda client: client.layout(digest, bearer), _LAYOUT_SECONDS, most)
            if layout is not None and layout.covers(manifest.contents):
                return layout
        return None

    def _peers(self) -> list[RingMember]:
        members = self.members.current().members
        peers = [member for member in members if member.node != self.members.me]
        random.shuffle(peers)
        return peers


async def _ask(
    peer: RingMember, question: Callable[[ContentClient], Awaitable[_Document]], seconds: float, most_bytes: int
) -> _Document | None:
    """Its answer; None whatever else it says or does, because the next peer may have the document."""
    try:
        # A mirror in this much.
        async with asyncio.timeout(seconds), ContentClient(peer.advertise, most_bytes=most_bytes) as client:
            return await question(client)
    except (BdnError, TimeoutError) as error:
        logger.debug("%s has no document for us: %s", peer.node, error)
        return None


@dataclass(frozen=True)
class Catalogue:
    """What a grant's manifests are. The mirror is asked only for what this disk does not know.

    ``answer_seconds`` is what it has for an answer: before others have been asked, and afterwards.
    """

    records: ManifestRecords
    client: ContentClient
    peers: PeerDocuments
    policy: RetryPolicy
    answer_seconds: tuple[float, float]

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
        """The manifest, and its layout unless everything is here.

        The layout is asked for again although it may be on this disk, because it says on which port the mirror serves
        chunks now; if the mirror does not give it, the one on this disk is used.

        Raises ``BdnError``: it is not here, and neither the mirror nor a peer gave it.
        """
        manifest = await in_thread(self.records.load, digest)
        if manifest is None:
            manifest = await self._persist(
                lambda: self.client.manifest(digest, bearer), lambda: self.peers.manifest(digest, bearer)
            )
        if is_complete:
            return Held(manifest, None)
        return Held(manifest, await self._layout(manifest, bearer))

    async def layout(self, manifest: Digest, bearer: str | None) -> Layout:
        """From the mirror or, while that does not answer, from what this node has staged. Raises the mirror's error."""
        try:
            return await self.client.layout(manifest, bearer)
        except BdnError as error:
            known = await in_thread(self.records.load_layout, manifest) if error.transient else None
            if known is None:
                raise
            return known

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
        self, ask: Callable[[], Awaitable[_Document]], instead: Callable[[], Awaitable[_Document | None]]
    ) -> _Document:
        """Ask the mirror; after a failure that may pass, others; then the mirror again: one that restarts shall not fail a job.

        A mirror that says nothing at all costs a stage little where others know the answer, and has its full time for a long
        answer where nobody does.
        """
        outage = Outage(self.policy)
        while True:
            sent = time.monotonic()
            try:
                return await self.client.within(self.answer_seconds[outage.failures > 0], ask())
            except BdnError as error:
                taken = time.monotonic() - sent
                if error.transient and (found := await instead()) is not None:
                    return found
                delay = outage.delay(error, taken, random.random())  # noqa: S311 - jitter, not a secret
                if delay is None:
                    raise
            await asyncio.sleep(delay)
