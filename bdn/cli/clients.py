"""The clients with which commands reach the mirror and the agent."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bdn.cli.output import Output
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.tls import Authorities
from bdn.settings import Bearer, FileSettings, ServiceUrl, default_data_dir
from bdn.wire.access_schema import ORGANISATION_PATTERN


class ClientSettings(FileSettings):
    url: ServiceUrl = "http://127.0.0.1:8460"
    token: Bearer | None = Field(default=None, repr=False)
    organisation: Annotated[str | None, Field(pattern=f"^{ORGANISATION_PATTERN}$")] = None  # for an operator's commands
    tls_ca: Path | None = None  # None trusts the system's authorities
    data_dir: Path = Field(default_factory=default_data_dir)
    agent_socket: Annotated[Path | None, Field(description="BDN_AGENT_SOCKET")] = None


def mirror_client() -> MirrorClient:
    settings = ClientSettings()
    return MirrorClient(
        settings.url, settings.token, organisation=settings.organisation, authorities=Authorities(settings.tls_ca)
    )


def agent_client() -> AgentClient:
    settings = ClientSettings()
    return AgentClient(f"unix:{settings.agent_socket or settings.data_dir / 'agent.sock'}")


@asynccontextmanager
async def reachable_mirror(output: Output, *, even_a_new_one: bool = False) -> AsyncIterator[MirrorClient]:
    """The mirror of ``BDN_URL``, or, if unset and none runs, an embedded one on the data directory of ``bdn pull``.

    With ``even_a_new_one`` it creates the data directory, for commands that may run before the first pull.
    """
    settings = ClientSettings()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(mirror_client())
        is_here = even_a_new_one or (settings.data_dir / "mirror.sqlite").exists()
        if is_here and "url" not in settings.model_fields_set and not await client.ready():
            # Imports a whole mirror, which most commands do not need.
            from bdn.cli.running import embedded_services  # noqa: PLC0415

            mirror, _ = await stack.enter_async_context(embedded_services(output, "bdn-admin"))
            client = await stack.enter_async_context(MirrorClient(mirror.url, organisation=settings.organisation))
        yield client


@asynccontextmanager
async def reachable_agent(output: Output) -> AsyncIterator[AgentClient]:
    """The agent on this machine, or, if no socket is set and none runs, an embedded one, as in ``reachable_mirror``."""
    settings = ClientSettings()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(agent_client())
        is_here = settings.agent_socket is None and (settings.data_dir / "mirror.sqlite").exists()
        if is_here and not await client.ready():
            from bdn.cli.running import embedded_services  # noqa: PLC0415 - as above

            _, agent = await stack.enter_async_context(embedded_services(output, "bdn-admin", serve=True))
            client = await stack.enter_async_context(AgentClient(agent.address))
        yield client
