"""The agent of a service, as used by pulls."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import BdnError, InvalidRequestError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.api_clients import AgentClient
from bdn.net.client import OutageRetry
from bdn.wire.stage_schema import PullCheck, PullLosses, PullRequest, StageDocument

# A pull does not wait for restarting services: a restart cancels the pull's work.
AT_ONCE: Final = OutageRetry(policy=RetryPolicy(outage_seconds=0, attempts=1))


@dataclass(frozen=True)
class RunningAgent:
    """The agent of a service, over its socket. It serves pulls only to its own user."""

    client: AgentClient

    async def check_destination(self, destination: Path, *, hub: bool = False) -> None:
        await self.client.check_pull(PullCheck(destination=named(destination), hub=hub))

    async def would_lose(self, grant: str, destination: Path) -> PullLosses:
        return await self.client.check_pull(PullCheck(destination=named(destination), grant=grant))

    async def pull(
        self, grant: str, destination: Path, *, link: bool, hub: bool = False
    ) -> AsyncIterator[StageDocument]:
        begun = await self.client.pull(PullRequest(destination=named(destination), grant=grant, link=link, hub=hub))
        try:
            async for stage in self.client.follow(begun.id, 0.2, AT_ONCE):
                yield stage
        except asyncio.CancelledError:  # the caller is gone: nothing may be published later
            with suppress(BdnError):
                await self.client.unstage(begun.id)
            raise


def named(destination: Path) -> str:
    """The absolute path: the agent has another current directory. Raises ``InvalidRequestError``."""
    path = Path(os.path.realpath(destination))  # the agent reports circular links
    if path == Path.cwd() or path in Path.cwd().parents:
        raise InvalidRequestError(
            f"cannot put files at {path}: it is, or holds, the current directory; name a directory below it"
        )
    try:
        return os.fsencode(path).decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"cannot put files at {path!r}: the running agent accepts only UTF-8 names") from None
