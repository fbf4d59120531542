"""Manifests and layouts from peers, while the mirror does not answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.manifest import Manifest
from bdn.net.client.mirror_client import MirrorClient
from bdn.wire.layout_form import Layout
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

        for few in _several(self._peers()):
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(peer)) for peer in few]
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


def _several(peers: list[RingMember]) -> Iterator[list[RingMember]]:
    for start in range(0, len(peers), _ASKED_AT_ONCE):
        yield peers[start : start + _ASKED_AT_ONCE]


async def _ask(
    peer: RingMember, question: Callable[[MirrorClient], Awaitable[_Document]], seconds: float, most_bytes: int
) -> _Document | None:
    """Its answer; None whatever else it says or does, because the next peer may have the document."""
    try:
        # A mirror in this much.
        async with asyncio.timeout(seconds), MirrorClient(peer.advertise, most_bytes=most_bytes) as client:
            return await question(client)
    except (BdnError, TimeoutError) as error:
        logger.debug("%s has no document for us: %s", peer.node, error)
        return None
