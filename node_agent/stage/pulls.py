"""Pulls: stages that show a grant's only manifest at a directory of the user's choice, for ``bdn pull``."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import CacheFullError, CacheTooSmallError, InvalidRequestError
from bdn.core.layout import Manifest
from bdn.core.room import Need, Tree
from bdn.disk.durable import disk_errors
from bdn.disk.threads import in_thread
from bdn.wire.stage_schema import PullLosses, StageDocument
from node_agent.background_tasks import in_steps
from node_agent.cache.node_cache import NodeCache
from node_agent.stage.pulled import PulledDirectories
from node_agent.stage.stage import NodeStage
from node_agent.stage.stages import StageService
from node_agent.stage.view.destination import Destination, resolved
from node_agent.stage.view.hub import HubSnapshot

_NO_COPY: Final = (
    "No copy is made where the cache (BDN_AGENT_CACHE_DIR) and DEST are on one file system, with reflinks (xfs, btrfs)"
)


@dataclass(frozen=True)
class Pulls:
    stages: StageService

    @property
    def _cache(self) -> NodeCache:
        return self.stages.lifecycle.cache

    @property
    def _directories(self) -> PulledDirectories:
        return self.stages.lifecycle.pulled

    async def begin(self, token: str, destination: Path, *, link: bool = False, hub: bool = False) -> NodeStage:
        """Stage a grant's only manifest and publish it at a directory. Immediate if an intact equal pull exists.

        Files share blocks with the cache or are copies. With ``link``, on one file system, they are hard links to
        the cache: they use no space, and a write to one changes the cached file, which is detected before its next use.

        With ``hub`` the directory is a snapshot in the cache of the hub's client (``view/hub.py``), which may hold other
        files of its commit; ``link`` has no effect there.

        The directory holds the lease: once it is gone, the stage is released.

        Raises:
            InvalidRequestError: the directory contains files that BDN did not publish. Nothing was begun.
            GrantInvalidError, GrantExpiredError, DiskFailedError: nothing was begun.
        """
        grant = await self.stages.check(token)
        if len(grant.mounts) != 1:
            raise InvalidRequestError(f"a pull takes a grant for one source, not for {len(grant.mounts)}")
        path = await in_thread(resolved, destination)
        record = self.stages.record(f"pull:{path}", token, grant)
        record.destination, record.link, record.hub = path, link or hub, hub
        known = self.stages.registry.get(record.id)
        if known and known.is_working:
            return known
        if (
            known
            and not known.is_ending
            and await in_thread(self._directories.is_standing, known.record, link=record.link)
        ):
            return known
        earlier = await in_thread(self._directories.published_at, path)
        await in_thread(self._directories.at(record).check, earlier)
        if earlier and str(earlier.digest) == record.mounts[0].manifest:
            record.inode = earlier.inode  # the directory that this pull replaces
        if known and known.record.state == "READY":
            await self.stages.lifecycle.release(known)
        return await self.stages.begin(NodeStage(record, earlier))

    async def pull(
        self, grant: str, destination: Path, *, link: bool, hub: bool = False
    ) -> AsyncIterator[StageDocument]:
        """As ``begin``. Yields the stage repeatedly, the last time in a terminal state."""
        begun = await self.begin(grant, destination, link=link, hub=hub)
        async for document in self.stages.follow(begun.record.id, 0.2):
            yield document

    async def check_destination(self, destination: Path, *, hub: bool = False) -> None:
        """Raises ``InvalidRequestError`` if no pull could be published at the directory."""
        path = await in_thread(resolved, destination)
        if hub:
            await in_thread(HubSnapshot(path, "check", self._cache.files.whole).check, None)
        # A present publication is verified later, once: that is slow for many files.
        elif await in_thread(self._directories.published_at, path) is None:
            await in_thread(Destination(path, "check", self._cache.files.whole, 0).check, None)

    async def would_lose(self, token: str, destination: Path) -> PullLosses:
        """Files of an earlier pull that this pull would remove or replace."""
        earlier = await self.earlier(destination)
        if earlier is None:
            return PullLosses()
        kept = {(file.path, file.digest) for file in (await self.coming(token)).files}
        lost = [file.path for file in earlier.files if (file.path, file.digest) not in kept]
        return PullLosses(earlier=str(earlier.digest), lost=lost)

    async def earlier(self, destination: Path) -> Manifest | None:
        """The manifest that an earlier pull published at the directory, if known."""
        path = await in_thread(resolved, destination)
        found = await in_thread(self._directories.published_at, path)
        return None if found is None else found.manifest

    async def coming(self, token: str) -> Manifest:
        """A grant's only manifest, without caching it."""
        (mount,) = (await self.stages.verify(token)).mounts
        catalogue = self.stages.lifecycle.provision.catalogue
        return (await catalogue.obtain(mount.manifest, token, is_complete=True)).manifest

    async def is_whole(self, destination: Path, *, link: bool) -> bool:
        """Whether the directory is as the last pull left it, and that pull matches ``link``."""
        path = await in_thread(resolved, destination)
        known = [stage.record for stage in self.stages.registry.all() if stage.record.destination == path]
        return any([await in_thread(self._directories.is_standing, record, link=link) for record in known])

    async def needs(
        self, destination: Path, before: Need | None, tree: Tree, *, link: bool, hub: bool = False
    ) -> list[Need]:
        """Space that a tree needs in the cache and in the directory, after the writes of ``before``.

        The directory needs space for copies, if its files can be neither links, with ``link``, nor share blocks.

        Raises ``CacheTooSmallError``, ``CacheFullError``: the tree alone does not fit the cache.
        """
        index = self._cache.index
        absent = (size for content, size in tree.contents.items() if index.ledger.size_of(content) is None)
        lacking = tree.unknown + sum(absent)
        by_others = set(index.leases.leased())
        # What the pull itself will lease is not evicted for it, either.
        own = (content for content in tree.contents if index.named_by(content).isdisjoint(by_others))
        leased = sum(index.ledger.size_of(content) or 0 for content in own) + await in_steps(index.counting_leased())
        path = await in_thread(resolved, destination)
        files = self._cache.files.whole
        site = HubSnapshot(path, "room", files) if hub else Destination(path, "room", files, 0, link)
        return await in_thread(self._needs, site, before, tree, lacking, leased)

    def _needs(
        self, site: Destination | HubSnapshot, before: Need | None, tree: Tree, lacking: int, leased: int
    ) -> list[Need]:
        space, root, place = self._cache.space, site.files.places.root, site.nearest()
        with disk_errors(place):
            own, other, disk = root.stat().st_dev, place.stat().st_dev, os.statvfs(place)
        budget = space.room().budgets.node
        total = tree.unknown + sum(tree.contents.values())
        if lacking and total > budget:
            raise CacheTooSmallError(total, budget)
        if lacking > budget - leased:
            raise CacheFullError(lacking, max(0, budget - space.node.used_bytes), leased, budget)
        earlier = {before.device: before.size} if before else {}
        room = space.room(padding=earlier.get(own, 0)).budgets.node - leased
        needs = [Need("the cache", str(root), own, lacking, room)]
        if site.makes_copies():
            free = disk.f_bavail * disk.f_frsize - earlier.get(other, 0)
            if other == own:
                free += space.node.used_bytes - leased - lacking  # what is not leased is evicted for the copies
            hint = _NO_COPY if site.is_in_place else f"{_NO_COPY} or with --link"
            needs.append(Need("copies", str(site.path), other, tree.size, free, hint))
        return needs
