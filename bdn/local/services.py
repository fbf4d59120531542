"""A mirror, and an agent beside it, in this process until it is stopped.

``bdn`` never imports ``node_agent``: the entry point ``bdn.embedded`` provides the agent.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol

import bdn
from bdn.core.layout import Manifest
from bdn.core.room import Need, Tree
from bdn.mirror.app import MirrorService, open_mirror
from bdn.mirror.db.data_lock import DataDirectoryInUseError
from bdn.mirror.db.database import database_url, place_of
from bdn.mirror.settings import MirrorSettings, embedded_settings
from bdn.net.api_server import bind_tcp, serving
from bdn.wire.stage_schema import PullLosses, StageDocument

logger = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS: Final = 0.2


@dataclass(frozen=True)
class RunningMirror:
    """A mirror that answers at ``url``; ``auth`` is its setting."""

    service: MirrorService
    url: str
    auth: str

    def for_pulls(self) -> AbstractContextManager[None]:
        """Inside the context, pulls on the same data directory use this mirror, and the agent that answers by then."""
        lock = self.service.lock
        return nullcontext() if lock is None else lock.answering(self.url, self.auth)


@asynccontextmanager
async def running_mirror(settings: MirrorSettings, program: str = "bdn serve") -> AsyncIterator[RunningMirror]:
    """API, worker and data plane of a mirror, answering until the block ends."""
    async with open_mirror(settings, program=program) as service:
        listener = bind_tcp(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        is_local, certificate = settings.auth == "off", service.certificate
        async with serving(service.api, listener, is_local=is_local, certificate=certificate):
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if certificate is not None:  # certificates do not name a wildcard address
                url = f"https://localhost:{port}" if host in ("0.0.0.0", "::") else url.replace("http:", "https:")  # noqa: S104
            with told(settings, "mirror", {"url": url, "data_port": service.data_port, "auth": settings.auth}):
                try:
                    yield RunningMirror(service, url, settings.auth)
                finally:
                    service.watch.stop()  # answer open requests now, not when they time out


@contextmanager
def told(settings: MirrorSettings, what: str, facts: Mapping[str, object]) -> Iterator[None]:
    """Log the start of a service, with the facts that operators need first, and its stop."""
    places = {
        "version": bdn.__version__,
        "database": place_of(database_url(settings.effective_database_url)),
        "store": settings.effective_store,
        "jobs": settings.jobs,
    }
    logger.info("%s started", what, extra={**facts, **places})
    try:
        yield
    finally:
        logger.info("%s stops", what, extra={**facts})


class PullAgent(Protocol):
    """An agent that puts files at directories, in this or another process."""

    async def check_destination(self, destination: Path, *, hub: bool = False) -> None:
        """Refuse a directory in which no view could be published, before any transfer."""

    async def would_lose(self, grant: str, destination: Path) -> PullLosses:
        """The files of an earlier pull at the directory that this one would remove or replace."""

    def pull(self, grant: str, destination: Path, *, link: bool, hub: bool = False) -> AsyncIterator[StageDocument]:
        """Publish a grant's only manifest at a directory. Yields the stage repeatedly, at last in a terminal state.

        With ``hub`` the directory is a snapshot in a cache of the hub's client.
        """


class EmbeddedPulls(PullAgent, Protocol):
    async def coming(self, grant: str) -> Manifest: ...

    async def earlier(self, destination: Path) -> Manifest | None:
        """The manifest of the last pull to the directory, if the directory is still that pull's."""

    async def is_whole(self, destination: Path, *, link: bool) -> bool:
        """Whether the directory is unchanged since the last pull, and that pull used the same ``link``."""

    async def needs(
        self, destination: Path, before: Need | None, tree: Tree, *, link: bool, hub: bool = False
    ) -> list[Need]:
        """The space that the cache and the directory need for a tree, once ``before`` is written."""


class EmbeddedAgent(Protocol):
    @property
    def pulls(self) -> EmbeddedPulls: ...

    async def mounted(self) -> list[Path]:
        """Mounts of stages and job volumes: they remain when the agent ends, and the next agent adopts them."""

    @property
    def address(self) -> str:
        """The address of its control API, empty without one."""

    @property
    def gateway(self) -> str:
        """The URL of its hub gateway, empty without one."""


Services = tuple[RunningMirror, EmbeddedAgent]


@asynccontextmanager
async def running_services(
    settings: MirrorSettings, *, program: str, serve: bool, is_alone: bool = False
) -> AsyncIterator[Services]:
    """Mirror and agent on one data directory until the block ends; ``serve`` opens the agent's control API.

    With ``is_alone`` the agent uses free ports instead of its usual ones.
    """
    async with running_mirror(settings, program) as mirror:
        place = settings.data_dir
        async with embedded_agent(mirror.url, settings.token, place, serve=serve, is_alone=is_alone) as agent:
            yield mirror, agent


def embedded_agent(
    mirror_url: str, token: str | None, data_dir: Path, *, serve: bool, is_alone: bool
) -> AbstractAsyncContextManager[EmbeddedAgent]:
    """An agent of a mirror; ``serve`` and ``is_alone`` as in ``running_services``."""
    (embedded,) = entry_points(group="bdn.embedded", name="agent")
    opened: AbstractAsyncContextManager[EmbeddedAgent] = embedded.load()(
        mirror_url=mirror_url, token=token, data_dir=data_dir, serve=serve, is_alone=is_alone
    )
    return opened


@asynccontextmanager
async def embedded_services(
    data_dir: Path, program: str, say: Callable[[str], object], *, serve: bool = False
) -> AsyncIterator[Services]:
    """Mirror and agent on free ports, for this process only. ``say`` is called with the reason of a wait.

    Waits for other commands that embed services on the same data directory, and for services that start or stop; not
    for services that answer.

    Raises ``DataDirectoryInUseError``: a service answers there, or another user's process has the directory.
    """
    settings = embedded_settings(data_dir)
    async with AsyncExitStack() as stack:
        services, told = None, False
        while services is None:
            try:
                services = await stack.enter_async_context(
                    running_services(settings, program=program, serve=serve, is_alone=True)
                )
            except DataDirectoryInUseError as error:
                if not error.is_passing:
                    raise
                if not told:
                    say(f"waiting for {', '.join(error.holders)}")
                told = True
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        yield services
