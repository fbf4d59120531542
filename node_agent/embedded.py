"""The agent inside another program (entry point ``bdn.embedded``), for ``bdn pull``, ``bdn up`` and the demo."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.disk.binding import mounts_below
from bdn.disk.threads import in_thread
from bdn.settings import SettingsError
from node_agent.app import Agent, open_agent
from node_agent.run.launchers import answering_launcher
from node_agent.settings import AgentSettings, load_settings
from node_agent.stage.pulls import Pulls

logger = logging.getLogger(__name__)
_GATEWAY: Final = "127.0.0.1", 8473


@dataclass(frozen=True)
class LocalAgent:
    """``address`` of the control API and ``gateway`` are empty if they are not served."""

    agent: Agent
    address: str
    gateway: str

    @property
    def pulls(self) -> Pulls:
        return self.agent.pulls

    async def mounted(self) -> list[Path]:
        """Mounts of stages and job volumes: they survive the agent, and the next agent adopts them."""
        places, scratch = self.agent.places, self.agent.settings.effective_scratch_dir.absolute()
        found = await in_thread(lambda: [mounts_below(folder) for folder in (places.root, places.mounts, scratch)])
        return sorted({path for paths in found for path in paths})


def _with_jobs(settings: AgentSettings) -> AgentSettings:
    """The role of training jobs, too, if a launcher works here. Blocking."""
    try:
        launcher = answering_launcher(settings.job_launcher)
    except SettingsError as error:
        logger.info("this agent takes no training jobs: %s", error)
        return settings
    return settings.model_copy(update={"roles": (*settings.roles, "job"), "job_launcher": launcher})


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
    if serve and not is_alone and "roles" not in settings.model_fields_set:
        settings = await in_thread(_with_jobs, settings)
    if serve and not is_alone and "gateway" not in settings.model_fields_set:
        settings = settings.model_copy(update={"gateway": _GATEWAY})
    async with AsyncExitStack() as stack:
        agent = await stack.enter_async_context(open_agent(settings))
        await agent.heartbeats.beat()
        address = gateway = ""
        if serve:
            from node_agent.api import serving_api  # noqa: PLC0415 - saves a pull a tenth of a second

            gateway = await stack.enter_async_context(serving_api(agent))
            address = f"unix:{settings.effective_socket}"
        yield LocalAgent(agent, address, gateway)
