"""The agent inside another program: what the entry point ``bdn.embedded`` names, for ``bdn pull``, ``bdn up`` and the demo."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bdn.wire.stage_schema import PullLosses, StageDocument
from node_agent.app import Agent, open_agent
from node_agent.settings import load_settings


@dataclass(frozen=True)
class LocalAgent:
    """A running agent, and the address of its control API if it serves one."""

    agent: Agent
    address: str

    async def check_destination(self, destination: Path) -> None:
        """Refuse a directory where no view could be published; raises ``InvalidRequestError``."""
        await self.agent.stages.check_destination(destination)

    async def would_lose(self, grant: str, destination: Path) -> PullLosses:
        """What an earlier pull put at the directory and this one would remove or replace."""
        return await self.agent.stages.would_lose(grant, destination)

    async def pull(self, grant: str, destination: Path, *, link: bool) -> AsyncIterator[StageDocument]:
        """Publish a grant's only manifest at a directory, as hard links with ``link``; the stage again and again, the last time in a terminal state."""
        begun = await self.agent.stages.pull(grant, destination, link=link)
        async for document in self.agent.stages.follow(begun.record.id, 0.2):
            yield document


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
