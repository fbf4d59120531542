"""The agent inside another program (entry point ``bdn.embedded``), for ``bdn pull``, ``bdn up`` and the demo."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import CacheFullError, CacheTooSmallError
from bdn.core.layout import Manifest
from bdn.core.room import Need, Tree
from bdn.disk.durable import disk_errors
from bdn.wire.stage_schema import PullLosses, StageDocument
from node_agent.app import Agent, open_agent
from node_agent.background_tasks import in_steps, in_thread
from node_agent.settings import load_settings
from node_agent.stage.view.destination import Destination, resolved
from node_agent.stage.view.exposure import mounts_below

_NO_COPY: Final = (
    "No copy is made where the cache (BDN_AGENT_CACHE_DIR) and DEST are on one file system, with reflinks (xfs, btrfs)"
)


@dataclass(frozen=True)
class LocalAgent:
    """``address`` of the control API is empty if it is not served."""

    agent: Agent
    address: str

    async def check_destination(self, destination: Path) -> None:
        """Raises ``InvalidRequestError`` if no view could be published at the directory."""
        await self.agent.stages.check_destination(destination)

    async def would_lose(self, grant: str, destination: Path) -> PullLosses:
        """Files of an earlier pull that this pull would remove or replace."""
        return await self.agent.stages.would_lose(grant, destination)

    async def pull(self, grant: str, destination: Path, *, link: bool) -> AsyncIterator[StageDocument]:
        """Publish a grant's only manifest at a directory, as hard links with ``link``.

        Yields the stage repeatedly, the last time in a terminal state.
        """
        begun = await self.agent.stages.pull(grant, destination, link=link)
        async for document in self.agent.stages.follow(begun.record.id, 0.2):
            yield document

    async def coming(self, grant: str) -> Manifest:
        return await self.agent.stages.coming(grant)

    async def earlier(self, destination: Path) -> Manifest | None:
        """The manifest that an earlier pull published at the directory, if known."""
        return await self.agent.stages.earlier(destination)

    async def is_whole(self, destination: Path, *, link: bool) -> bool:
        """Whether the directory is as the last pull left it, and that pull matches ``link``."""
        path = await in_thread(destination.resolve)
        stages = self.agent.stages
        known = [
            stage.record
            for stage in stages.registry.all()
            if stage.record.destination == path and stage.record.state == "READY" and stage.record.is_linked(link)
        ]
        return any([await in_thread(stages.lifecycle.is_intact_pull, record) for record in known])

    async def mounted(self) -> list[Path]:
        """Mounts of stages and job volumes: they survive the agent, and the next agent adopts them."""
        places, scratch = self.agent.places, self.agent.settings.effective_scratch_dir.absolute()
        found = await in_thread(lambda: [mounts_below(folder) for folder in (places.root, places.mounts, scratch)])
        return sorted({path for paths in found for path in paths})

    async def needs(self, destination: Path, before: Need | None, tree: Tree, *, link: bool) -> list[Need]:
        """Space that a tree needs in the cache and in the directory, after the writes of ``before``.

        The directory needs space for copies, if its files can be neither links, with ``link``, nor share blocks.

        Raises ``CacheTooSmallError``, ``CacheFullError``: the tree alone does not fit the cache.
        """
        index = self.agent.cache.index
        held = {content for content in tree.contents if index.ledger.size_of(content) is not None}
        lacking = tree.unknown + sum(size for content, size in tree.contents.items() if content not in held)
        # What the pull itself will lease is not evicted for it, either.
        own = sum(
            tree.contents[content] for content in held if not any(map(index.leases.is_leased, index.named_by(content)))
        )
        leased = own + await in_steps(index.counting_leased())
        path = await in_thread(resolved, destination)
        site = Destination(path, "room", self.agent.cache.files.whole, 0, link)
        return await in_thread(self._needs, site, before, tree, lacking, leased)

    def _needs(self, site: Destination, before: Need | None, tree: Tree, lacking: int, leased: int) -> list[Need]:
        space, root = self.agent.cache.space, self.agent.places.root
        place = site.nearest()
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


@asynccontextmanager
async def open_embedded_agent(
    *, mirror_url: str, token: str | None, data_dir: Path, serve: bool, is_alone: bool
) -> AsyncIterator[LocalAgent]:
    """An agent with the settings of the environment, on this data directory, after its first heartbeat.

    ``serve`` opens its control API. With ``is_alone`` it uses a random data port, no control port and no TLS.
    """
    alone = {"data_port": 0, "port": None, "tls": "optional", "tls_cert": None, "tls_key": None}
    given = alone if is_alone else {}
    settings = load_settings(url=mirror_url, token=token, data_dir=data_dir, **given)
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(open_agent(settings))
        await agent.heartbeats.beat()
        address = ""
        if serve:
            from node_agent.api import serving_api  # noqa: PLC0415 - saves a pull a tenth of a second

            await stack.enter_async_context(serving_api(agent))
            address = f"unix:{settings.effective_socket}"
        yield LocalAgent(agent, address)
