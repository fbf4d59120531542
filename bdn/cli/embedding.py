"""A mirror and an agent inside this process, for commands that shall work where no service runs.

``bdn`` never imports ``node_agent``: the agent is found through the entry point ``bdn.embedded``, and is what the Protocol
below says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from bdn.cli.output import Output
from bdn.cli.running import RunningMirror, running_mirror
from bdn.core.errors import InUseError, InvalidRequestError
from bdn.mirror.settings import MirrorSettings
from bdn.wire.stage_schema import StageDocument

_LOOK_AGAIN_SECONDS = 0.2
_SHORT_LIVED = ("bdn pull", "bdn-admin")


class EmbeddedAgent(Protocol):
    """An agent in this process. ``address`` is its control API where it serves one, otherwise empty."""

    address: str

    async def check_destination(self, destination: Path) -> None:
        """Refuse a directory where no view could be published, before anything is moved."""
        ...

    def pull(self, grant: str, destination: Path) -> AsyncIterator[StageDocument]:
        """Publish a grant's only manifest at a directory; the stage again and again, the last time in a terminal state."""
        ...


class OpenAgent(Protocol):
    """What the entry point names."""

    def __call__(
        self, *, mirror_url: str, token: str | None, data_dir: Path, serve: bool
    ) -> AbstractAsyncContextManager[EmbeddedAgent]:
        """An agent that is known to the mirror; ``serve`` opens its control API and its usual ports."""
        ...


@dataclass(frozen=True)
class Services:
    """Both programs, running here."""

    mirror: RunningMirror
    agent: EmbeddedAgent


@asynccontextmanager
async def running_services(settings: MirrorSettings, *, program: str, serve: bool) -> AsyncIterator[Services]:
    """Mirror and agent on one data directory until the block ends."""
    async with AsyncExitStack() as stack:
        mirror = await stack.enter_async_context(running_mirror(settings, program))
        opened = _open_agent()(mirror_url=mirror.url, token=settings.token, data_dir=settings.data_dir, serve=serve)
        yield Services(mirror, await stack.enter_async_context(opened))


@asynccontextmanager
async def embedded_services(output: Output, program: str) -> AsyncIterator[Services]:
    """Both on free ports. Waits for other commands that embed them on the same data directory; not for services."""
    settings = MirrorSettings(host="127.0.0.1", port=0, data_port=0, auth="off", token=None, jobs=1)
    async with AsyncExitStack() as stack:
        services, told = None, False
        while services is None:
            try:
                services = await stack.enter_async_context(running_services(settings, program=program, serve=False))
            except InUseError as error:
                if not any(holder.startswith(_SHORT_LIVED) for holder in error.holders):
                    raise
                if not told:
                    output.say(f"waiting for {', '.join(error.holders)}")
                told = True
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        yield services


def _open_agent() -> OpenAgent:
    found = list(entry_points(group="bdn.embedded"))
    if not found:
        raise InvalidRequestError("the agent is not installed here; install bdn[agent]")
    return cast("OpenAgent", found[0].load())
