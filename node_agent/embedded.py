"""The agent inside another program: what the entry point ``bdn.embedded`` names, for ``bdn pull``, ``bdn up`` and the demo."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bdn.wire.stage_schema import BytesFrom, StageDocument
from node_agent.app import Agent, open_agent
from node_agent.background_tasks import in_thread
from node_agent.settings import load_settings
from node_agent.stage.view.destination import Destination


@dataclass(frozen=True)
class LocalAgent:
    """A running agent, and the address of its control API if it serves one."""

    agent: Agent
    address: str

    async def check_destination(self, destination: Path) -> None:
        """Refuse a directory where no view could be published; raises ``InvalidRequestError``."""
        path = await in_thread(destination.resolve)
        # Whether what stands there is intact is looked at later, once: that takes a while for many files.
        if not await in_thread(self.agent.stages.lifecycle.stands_at, path):
            await in_thread(Destination(path, "check", self.agent.stages.lifecycle.views.files).check, None)

    async def pull(self, grant: str, destination: Path, *, link: bool) -> AsyncIterator[StageDocument]:
        """Publish a grant's only manifest at a directory, as hard links with ``link``; the stage again and again, the last time in a terminal state."""
        stages = self.agent.stages
        asked_at = datetime.now(UTC)
        begun = await stages.pull(grant, destination, link=link)
        async for document in stages.follow(begun.record.id, 0.2):
            if document.ready_at and document.ready_at < asked_at:  # it stood there: nothing came from anywhere
                for mount in document.mounts:
                    mount.bytes_from = BytesFrom(node=mount.bytes_total or 0)
            yield document

    async def would_lose(self, grant: str, destination: Path) -> tuple[str, list[str]]:
        """What an earlier pull put at the directory and this one would remove or replace: its manifest's digest as hex, and the paths."""
        lifecycle = self.agent.stages.lifecycle
        path = await in_thread(destination.resolve)
        earlier = await in_thread(lifecycle.published_at, path)
        if earlier is None or earlier.manifest is None or not await in_thread(lifecycle.stands_at, path):
            return "", []
        (mount,) = (await self.agent.stages.verify(grant)).mounts
        coming = await lifecycle.provision.catalogue.obtain(mount.manifest, grant, is_complete=True)
        kept = {(file.path, file.digest) for file in coming.manifest.files}
        lost = [file.path for file in earlier.manifest.files if (file.path, file.digest) not in kept]
        return earlier.digest.hex, lost


@asynccontextmanager
async def open_embedded_agent(
    *, mirror_url: str, token: str | None, data_dir: Path, serve: bool, is_alone: bool
) -> AsyncIterator[LocalAgent]:
    """An agent with the settings of the environment, on this data directory, that the mirror has heard of.

    ``serve`` opens its control API; one that ``is_alone`` has no port that others know.
    """
    given = {"data_port": 0, "port": None} if is_alone else {}
    settings = load_settings(url=mirror_url, token=token, data_dir=data_dir, **given)
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(open_agent(settings))
        await agent.heartbeats.beat()
        address = ""
        if serve:
            from node_agent.api import serving_api  # noqa: PLC0415 - a tenth of a second, that a pull needs not wait for

            await stack.enter_async_context(serving_api(agent))
            address = f"unix:{settings.effective_socket}"
        yield LocalAgent(agent, address)
