"""The clients with which commands reach the mirror and the agent."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from bdn.cli.output import Output, waiting_for
from bdn.client import services
from bdn.client.services import Services, open_services
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.settings import ClientSettings


def mirror_client() -> MirrorClient:
    return services.mirror_client(ClientSettings())


def agent_client() -> AgentClient:
    return services.agent_client(ClientSettings())


def both_services(output: Output) -> AbstractAsyncContextManager[Services]:
    """Mirror and agent; a command says when it waits for one of them."""
    return open_services(ClientSettings(), partial(waiting_for, output))


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
            from bdn.local.services import embedded_services  # noqa: PLC0415

            mirror, _ = await stack.enter_async_context(embedded_services(settings.data_dir, "bdn-admin", output.say))
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
            from bdn.local.services import embedded_services  # noqa: PLC0415 - as above

            embedded = embedded_services(settings.data_dir, "bdn-admin", output.say, serve=True)
            _, agent = await stack.enter_async_context(embedded)
            client = await stack.enter_async_context(AgentClient(agent.address))
        yield client
