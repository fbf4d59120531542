"""Manifests and layouts: from this disk, else from their owner in the ring, the mirror or, while that does not answer, any peer."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import BdnError
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.core.ring.placement import OWNERS_LOOKED_AT, Placement, route
from bdn.net.client import ContentClient
from bdn.net.tls import Authorities
from bdn.wire.layout_form import Layout
from bdn.wire.shapes import ServiceUnreachableError, UntrustedServiceError, WrongDocumentError
from node_agent.background_tasks import in_thread
from node_agent.cache.records import Held, ManifestRecords
from node_agent.fetch.peers import MIRROR, Peers, RingMember

logger = logging.getLogger(__name__)

_Document = TypeVar("_Document")
_OWNERS_ASKED: Final = 2  # rounds; whoever has not got the document by then asks the mirror alone
_MANIFEST_SECONDS: Final = 10.0
_MOST_MANIFEST_BYTES: Final = 512 * 1024**2  # of a million files it has 200 MB
_LAYOUT_SECONDS: Final = 60.0  # of a million files it has 300 MB
_SILENCE_SECONDS: Final = 5.0  # an owner that obtains a document says every second that it is at work


@dataclass(frozen=True)
class _Wanted(Generic[_Document]):
    """A document of ``manifest``. ``ask`` also tells the service whether it is to obtain the document as its owner, and checks it.

    A peer that holds it has ``seconds`` to send it, and not more than ``most_bytes`` of it; ``at_once`` are asked together.
    """

    manifest: Digest
    ask: Callable[[ContentClient, bool], Awaitable[_Document]]
    seconds: float
    most_bytes: int
    at_once: int


@dataclass(frozen=True)
class PeerDocuments:
    """Asks the members of the cluster. Nothing a peer says is believed before it was checked.

    Nor is it read without end: a manifest of more than ``most_manifest_bytes`` only the mirror can give, and of a layout it is
    known how long it may be. ``authorities`` are for peers that speak TLS.
    """

    peers: Peers
    most_manifest_bytes: int = _MOST_MANIFEST_BYTES
    authorities: Authorities = field(default_factory=Authorities)

    def manifest(self, digest: Digest, bearer: str) -> _Wanted[Manifest]:
        """A manifest, which is what its name says."""

        async def ask(client: ContentClient, is_owner: bool) -> Manifest:
            return await client.manifest(digest, bearer, is_owner=is_owner)

        return _Wanted(digest, ask, _MANIFEST_SECONDS, self.most_manifest_bytes, at_once=4)

    def layout(self, manifest: Manifest, bearer: str) -> _Wanted[Layout]:
        """Where its bytes lie: a layout of each of its contents, of the right size."""

        async def ask(client: ContentClient, is_owner: bool) -> Layout:
            layout = await client.layout(manifest.digest, bearer, is_owner=is_owner)
            if not layout.covers(manifest.contents):
                raise WrongDocumentError(f"the layout of {manifest.digest}", client.address, "it leaves out files")
            return layout

        return _Wanted(manifest.digest, ask, _LAYOUT_SECONDS, Layout.most_bytes(manifest.contents), at_once=1)

    async def owned(self, wanted: _Wanted[_Document]) -> tuple[_Document, str] | None:
        """The document from its owner, or from who would own it next, and who that was; None: the mirror is to be asked.

        An owner asks itself as others do: so it has one read of the mirror for its own stages and for all peers.
        """
        for owner in self._owners(wanted.manifest):
            if self.peers.claim(owner.node):
                found = await self._ask(owner, wanted, is_owner=True)
                if found is not None:
                    return found
        return None

    def _owners(self, manifest: Digest) -> Iterator[RingMember]:
        """As of a chunk of this name. Who finds itself on the way asks nobody behind it."""
        members, me = {member.node: member for member in self.peers.members.current().members}, self.peers.members.me
        if not members:
            return
        owners = Placement([manifest], list(members)).owners(0, OWNERS_LOOKED_AT)
        yield from (members[node] for node in route(owners, me, self.peers.is_avoided))
        if me in owners:
            yield members[me]

    async def held(self, wanted: _Wanted[_Document]) -> tuple[_Document, str] | None:
        """The document from whoever holds it, in an order of chance, and who that was; None when no peer has it for this bearer."""
        members = self.peers.members
        peers = [member for member in members.current().members if member.node != members.me]
        random.shuffle(peers)
        for start in range(0, len(peers), wanted.at_once):
            some = peers[start : start + wanted.at_once]
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(peer, wanted, is_owner=False)) for peer in some]
            for one in asked:
                if (found := one.result()) is not None:
                    return found
        return None

    async def _ask(
        self, peer: RingMember, wanted: _Wanted[_Document], *, is_owner: bool
    ) -> tuple[_Document, str] | None:
        """Its document, and its name; None whatever else it says or does, because the next one may have the document."""
        seconds = None if is_owner else wanted.seconds  # an owner may have to wait for the mirror, and says so
        try:
            async with (
                asyncio.timeout(seconds),
                ContentClient(
                    peer.advertise,
                    silence_seconds=_SILENCE_SECONDS,
                    most_bytes=wanted.most_bytes,
                    authorities=self.authorities,
                ) as client,
            ):
                found = await wanted.ask(client, is_owner)
        except WrongDocumentError as error:
            logger.warning("%s sent a wrong document: %s", peer.node, error)
            self.peers.sent_wrong([peer.node])
        except (BdnError, TimeoutError) as error:
            logger.debug("%s has no document for us: %s", peer.node, error)
            # What it answers, such as that it cannot reach the mirror, is not its fault; that it does not answer, is.
            if isinstance(error, ServiceUnreachableError) and error.__cause__ is not None:
                self.peers.failed(peer.node)
            else:
                self.peers.answered(peer.node)
        else:
            self.peers.answered(peer.node)
            return found, peer.node
        return None


@dataclass(frozen=True)
class Catalogue:
    """What a grant's manifests are. Others are asked only for what this disk does not know.

    ``answer_seconds`` is what the owner and the mirror have for an answer together: before others have been asked, and
    afterwards. ``on_obtained`` is told the tier of each document.
    """

    records: ManifestRecords
    client: ContentClient
    peers: PeerDocuments
    policy: RetryPolicy
    answer_seconds: tuple[float, float]
    on_obtained: Callable[[str], object] = lambda _: None

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool, from_mirror: bool = False) -> Held:
        """The manifest, and its layout unless everything is here.

        The layout is asked for again although it may be on this disk, because it says on which port the mirror serves
        chunks now; if nobody gives it, the one on this disk is used. ``from_mirror``: no peer's layout will do.

        Raises ``BdnError``: it is not here, and neither the mirror nor a peer gave it.
        """
        manifest = await in_thread(self.records.load, digest)
        if manifest is None:
            wanted = self.peers.manifest(digest, bearer)
            manifest = (await self._persist(wanted, partial(self.peers.held, wanted)))[0]
        if is_complete:
            return Held(manifest, None)
        return Held(manifest, *await self._layout(manifest, bearer, from_mirror=from_mirror))

    async def renew(self, held: Held, bearer: str) -> Held:
        """With the mirror's own layout, because the one that a peer sent was wrong or is out of date."""
        if not held.sender:
            return held
        if held.sender != self.peers.peers.members.me:
            self.peers.peers.failed(held.sender)
        return await self.obtain(held.manifest.digest, bearer, is_complete=False, from_mirror=True)

    async def _layout(self, manifest: Manifest, bearer: str, *, from_mirror: bool) -> tuple[Layout, str]:
        digest, wanted, me = manifest.digest, self.peers.layout(manifest, bearer), self.peers.peers.members.me

        async def instead() -> tuple[Layout, str] | None:
            known = await in_thread(self.records.load_layout, digest)
            return (known, me) if known is not None else await self.peers.held(wanted)

        try:
            return await self._persist(wanted, instead, from_mirror=from_mirror)
        except BdnError:
            known = await in_thread(self.records.load_layout, digest)
            if known is None or from_mirror:
                raise
            return known, me

    async def _persist(
        self,
        wanted: _Wanted[_Document],
        instead: Callable[[], Awaitable[tuple[_Document, str] | None]],
        *,
        from_mirror: bool = False,
    ) -> tuple[_Document, str]:
        """Ask the owner, then the mirror; after a failure that may pass, others; then again: one that restarts shall not fail a job.

        A mirror that says nothing at all costs a stage little where others know the answer, and has its full time for a long
        answer where nobody does.
        """
        outage = Outage(self.policy)

        async def ask() -> tuple[_Document, str]:
            if outage.failures < _OWNERS_ASKED and not from_mirror:
                owned = await self.peers.owned(wanted)
                if owned is not None:
                    self.on_obtained("cluster")
                    return owned
            document = await wanted.ask(self.client, False)
            self.on_obtained("mirror")
            return document, MIRROR

        while True:
            sent = time.monotonic()
            try:
                return await self.client.within(self.answer_seconds[outage.failures > 0], ask())
            except BdnError as error:
                taken = time.monotonic() - sent
                # Of a mirror that is not trusted, too: peers may have it.
                may_pass = error.transient or isinstance(error, UntrustedServiceError)
                if may_pass and not from_mirror and (found := await instead()) is not None:
                    self.on_obtained("cluster")
                    return found
                delay = outage.delay(error, taken, random.random())  # noqa: S311 - jitter, not a secret
                if delay is None:
                    raise
            await asyncio.sleep(delay)
