"""The mirror that a command talks to: a service, or one that is opened for the command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bdn.cli.output import Output
from bdn.cli.services import ClientSettings, mirror_client
from bdn.net.client.mirror_client import MirrorClient


@asynccontextmanager
async def reachable_mirror(output: Output, *, even_a_new_one: bool = False) -> AsyncIterator[MirrorClient]:
    """The mirror of ``BDN_URL``; where that is not set and none runs, the one that ``bdn pull`` left in the data directory.

    ``even_a_new_one`` makes one there, for what has to be said before the first pull.
    """
    settings = ClientSettings()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(mirror_client())
        embedded = "url" not in settings.model_fields_set and (
            even_a_new_one or (settings.data_dir / "mirror.sqlite").exists()
        )
        if embedded and not await client.ready():
            # A whole mirror; most commands talk to one, and need none.
            from bdn.cli.embedding import embedded_services  # noqa: PLC0415

            services = await stack.enter_async_context(embedded_services(output, "bdn-admin"))
            client = await stack.enter_async_context(
                MirrorClient(services.mirror.url, organisation=settings.organisation)
            )
        yield client
