"""Obtains manifests: roots from the mirror or, in its outage, this disk or a peer; pages by the chain of readers."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final

from bdn.core.chunk import Digest, MalformedDocumentError
from bdn.core.errors import BdnError, InternalError, single_error
from bdn.core.manifest import PageRef, Root
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.core.source.uri import HuggingFaceUri
from bdn.disk.durable import disk_errors, write_durably
from bdn.disk.threads import in_thread
from bdn.local.hub_cache import tree_document, tree_entry
from bdn.net.api_clients import MirrorClient
from bdn.net.client import ContentClient, OutageRetry
from bdn.net.tls import Authorities
from bdn.transfer.byte_threads import ByteThreads
from bdn.transfer.chunk_readers import ChunkReader, fetch
from bdn.wire.shapes import ServiceUnreachableError, UntrustedServiceError, WrongDocumentError
from node_agent.cache.records import Held, ManifestRecords
from node_agent.fetch.chain import ReaderChain
from node_agent.fetch.fill_context import FillContext, RetryBudget, Routing
from node_agent.fetch.peers import Peers, RingMember
from node_agent.fetch.reads_in_progress import ReadsInProgress, landed

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 4  # concurrent requests for a root to peers
_ROOT_SECONDS: Final = 10.0  # time limit for a peer to send a root
_SILENCE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class PeerRoots:
    """Requests roots from members of the cluster. ``authorities`` are for peers with TLS."""

    peers: Peers
    authorities: Authorities = field(default_factory=Authorities)

    async def find(self, digest: Digest, bearer: str) -> Root | None:
        """Request the root from peers in random order. None if no peer has it for this bearer."""
        members = self.peers.members
        peers = [member for member in members.current().members if member.node != members.me]
        random.shuffle(peers)
        for start in range(0, len(peers), _AT_ONCE):
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._ask(peer, digest, bearer)) for peer in peers[start : start + _AT_ONCE]]
            if found := next(filter(None, (one.result() for one in asked)), None):
                return found
        return None

    async def _ask(self, peer: RingMember, digest: Digest, bearer: str) -> Root | None:
        """None on any failure, because the next peer may have the root."""
        client = ContentClient(peer.advertise, silence_seconds=_SILENCE_SECONDS, authorities=self.authorities)
        try:
            async with asyncio.timeout(_ROOT_SECONDS), client:
                found = await client.held_root(digest, bearer)
        except WrongDocumentError as error:
            logger.warning("peer %s sent a wrong manifest root: %s; requesting it elsewhere", peer.node, error)
            self.peers.sent_wrong([peer.node])
        except (BdnError, TimeoutError) as error:
            logger.debug("peer %s did not send the manifest root: %s", peer.node, error)
            if isinstance(error, ServiceUnreachableError) and error.__cause__ is not None:
                self.peers.failed(peer.node)
            else:
                self.peers.answered(peer.node)
        else:
            self.peers.answered(peer.node)
            return found
        return None


@dataclass(frozen=True)
class Catalogue:
    """Obtains manifests.

    ``threads`` read pages; they are separate from fills' threads, so no page waits behind a stage's chunks.
    ``answer_seconds`` are the time limits for the mirror to send a root: before the requests to peers, and after.
    ``on_obtained`` gets the tier of each document.
    """

    records: ManifestRecords
    client: MirrorClient
    peers: PeerRoots
    chain: ReaderChain
    threads: ByteThreads
    policy: RetryPolicy
    answer_seconds: tuple[float, float]
    on_obtained: Callable[[str], object] = lambda _: None
    _reads: ReadsInProgress = field(default_factory=ReadsInProgress)

    async def obtain(self, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
        """Obtain a manifest, without a request to the mirror if it ``is_complete`` on this disk.

        Raises ``BdnError``: it is not on this disk, and neither the mirror nor a peer sent it.
        """
        known = await in_thread(self.records.load, digest)
        if known is not None and is_complete:
            return known
        root = await self._root(digest, bearer, known.root if known else None)
        return known or await self.read(root, bearer)

    async def root(self, digest: Digest, bearer: str) -> Root:
        """Obtain the root alone, for a peer whose grant was verified. Requests a missing root from the mirror.

        Raises ``BdnError`` like ``obtain``.
        """
        recent = self.records.recent.get(digest)
        known = recent.root if recent else await in_thread(self.records.load_root, digest)
        if known is not None and self.chain.plane.is_known:
            return known
        return await self._root(digest, bearer, known)

    async def read(self, root: Root, bearer: str) -> Held:
        """Read the pages, once for concurrent callers. Raises ``BdnError``."""
        while (known := self.records.recent.get(root.digest)) is None:
            if (flight := self._reads.flight(root.digest)) is not None:
                await landed(flight)
                continue
            with self._reads.lead(root.digest):  # always leads: no other task ran on the loop since ``flight``
                known = await self._read(root, bearer)
                self.records.recent.put(known)
                return known
        return known

    async def tree(self, manifest: Digest, commit: HuggingFaceUri, bearer: str) -> None:
        """Keep the listing of the whole commit beside its manifest, as ``trees/<commit>.json`` of the hub's cache.

        Requests it from the mirror, once for concurrent callers, in an outage for as long as the policy says. Raises
        ``BdnError``.
        """
        place, key = self.records.tree(manifest, commit.revision or ""), (manifest, commit)
        while not await in_thread(place.exists):
            if (flight := self._reads.flight(key)) is not None:
                await landed(flight)
                continue
            with self._reads.lead(key):  # always leads, as in ``read``
                if not await in_thread(place.exists):
                    await self._read_tree(place, commit, bearer)

    async def _read_tree(self, place: Path, commit: HuggingFaceUri, bearer: str) -> None:
        entries: list[bytes] = []  # a tenth of the memory of the parsed files
        async for page in self.client.tree_pages(str(commit), bearer=bearer, outages=OutageRetry(policy=self.policy)):
            entries += map(tree_entry, page)
        with disk_errors(place):
            await in_thread(write_durably, place, tree_document(entries))

    async def _root(self, digest: Digest, bearer: str, known: Root | None) -> Root:
        """Request the root; on failure use a known root or a peer's, or retry: a mirror restart fails no job.

        A silent mirror delays a stage little if peers have the root. If no peer has it, the mirror gets its full time
        for a slow answer.
        """
        outage = Outage(self.policy)
        while True:
            sent, seconds = time.monotonic(), self.answer_seconds[outage.failures > 0]
            try:
                asked = self.client.root(digest, bearer, is_known=known is not None)
                root, plane = await self.client.within(seconds, asked)
            except BdnError as error:
                taken = time.monotonic() - sent
                if known is not None:
                    return known
                # Also if the mirror is not trusted: peers may have the root.
                may_pass = error.transient or isinstance(error, UntrustedServiceError)
                if may_pass and (found := await self.peers.find(digest, bearer)) is not None:
                    self.on_obtained("cluster")
                    return found
                delay = outage.delay(error, taken, random.random())  # noqa: S311 - jitter, not a secret
                if delay is None:
                    raise
            else:
                self.chain.plane.tell(plane)
                if root is not None:
                    self.on_obtained("mirror")
                    return root
                if known is not None:
                    return known
                raise InternalError(f"the mirror sent no root of manifest {digest}")
            await asyncio.sleep(delay)

    async def _read(self, root: Root, bearer: str) -> Held:
        """Read the pages, beginning with the pages that peers will request from this node."""
        names, peers, stop = [page.digest for page in root.pages], self.chain.peers, Event()
        routing = Routing(lambda: names, peers.members)
        await in_thread(routing.prepare)
        budget = RetryBudget(sum(page.size for page in root.pages), peers.avoided)
        ahead = iter([name for name in names if routing.turn(name).is_own])
        reader = self.chain.of_fill(FillContext(root.digest, bearer, routing, budget, ahead=ahead), stop)
        found: dict[Digest, bytes] = {}

        async def bring(page: PageRef) -> None:
            work = partial(self._read_page, root, page, reader, routing)
            found[page.digest] = await self.threads.run(page.size, work, stop.set)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for page in sorted(root.pages, key=lambda page: routing.turn(page.digest).order):
                    group.create_task(bring(page))
        try:
            return await in_thread(Held.of, root, tuple(found[name] for name in names))
        except MalformedDocumentError as error:
            raise InternalError(f"manifest {root.digest}: {error}") from error

    def _read_page(self, root: Root, page: PageRef, reader: ChunkReader, routing: Routing, buffer: memoryview) -> bytes:
        """Runs in a byte thread. An owner stores the page for its peers."""

        def store() -> None:
            if routing.is_mine(page.digest):
                self.chain.held.tier.keep(root.digest, page.digest, buffer)

        came = fetch(reader, page.digest, buffer, store)
        self.on_obtained(max(came, key=came.__getitem__))
        return bytes(buffer)
