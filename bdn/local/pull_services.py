"""The mirror and the agent of a pull: embedded, or of services on the same data directory (docs/adr/0044)."""

import asyncio
import os
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bdn.core.chunk import Digest
from bdn.core.source.uri import HuggingFaceUri, WeightsSource
from bdn.local.running_agent import AT_ONCE, RunningAgent
from bdn.local.services import PullAgent, Services, embedded_agent, embedded_services
from bdn.mirror.access.key_files import load_grant_signer
from bdn.mirror.db.data_lock import DataDirectoryInUseError
from bdn.mirror.db.recall import held_in, is_update_in
from bdn.mirror.ingest.requests import HeldSource
from bdn.mirror.settings import MirrorSettings, embedded_settings
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.tls import Authorities
from bdn.settings import ClientSettings
from bdn.wire.access_schema import DEFAULT_ORGANISATION
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.mirror_schema import HubFile, Mirror, MirrorRequestBody, body_from
from bdn.wire.shapes import ServiceStoppedError, ServiceUnreachableError, UntrustedServiceError


class PullRequests(Protocol):
    """A pull's interface to its mirror; ``MirrorRequests`` implements it."""

    async def request(self, sources: Sequence[WeightsSource], organisation: str) -> Mirror: ...

    def follow(self, mirror_id: str, organisation: str, interval_seconds: float) -> AsyncGenerator[Mirror]:
        """Yields the mirror repeatedly, the last time in a terminal state."""

    async def held(self, wanted: WeightsSource, organisation: str, *, is_newest: bool) -> HeldSource | None:
        """The held version of a commit, or with ``is_newest`` the last one of any source. Queries no upstream."""

    async def is_update(self, manifest: str, wanted: WeightsSource, organisation: str) -> bool:
        """Whether the manifest (hex) is an earlier or the current version of the same source with the same patterns."""

    async def tree(self, source: HuggingFaceUri, organisation: str, *, is_held: bool) -> Sequence[HubFile]:
        """All files of a mirrored commit. Queries the hub if only a part was listed; with ``is_held`` never."""


@asynccontextmanager
async def services_of_pull(
    settings: ClientSettings, say: Callable[[str], object], *, is_alone: bool
) -> AsyncIterator[tuple[PullRequests, PullAgent, Services | None]]:
    """Yields the mirror and the agent to use, and the services themselves if they are in this process.

    ``is_alone``: the pull needs its own services.

    Raises:
        InUseError: the data directory is in use, but not by a service that answers, or its cache by an agent that does
            not.
        ServiceStoppedError: also from the block: a service in use stopped.
    """
    async with AsyncExitStack() as stack:
        own: Services | None = None
        requests: PullRequests
        agent: PullAgent
        try:
            own = await stack.enter_async_context(embedded_services(settings.data_dir, "bdn pull", say))
            requests, agent = own[0].service.requests, own[1].pulls
        except DataDirectoryInUseError as error:
            if is_alone or not error.url:
                raise
            requests, agent = await stack.enter_async_context(
                _beside(settings, error.url, error.auth, error.holders[0])
            )
        yield requests, agent, own


@asynccontextmanager
async def _beside(
    given: ClientSettings, url: str, auth: str, holder: str
) -> AsyncIterator[tuple[PullRequests, PullAgent]]:
    settings, socket = embedded_settings(given.data_dir), given.effective_agent_socket
    token = given.token if auth == "token" else None
    try:
        async with AsyncExitStack() as stack:
            asking = MirrorClient(url, token, organisation=given.organisation, authorities=Authorities(given.tls_ca))
            client = await stack.enter_async_context(asking)
            signer = await asyncio.to_thread(load_grant_signer, settings)
            requests = _RunningMirror(client, settings, signer, given.organisation or DEFAULT_ORGANISATION)
            running = await stack.enter_async_context(AgentClient(f"unix:{socket}"))
            agent: PullAgent
            if await asyncio.to_thread(_is_own, socket) and await running.ready():
                agent = RunningAgent(running)
            else:
                own = embedded_agent(url, token, settings.data_dir, serve=False, is_alone=True)
                agent = (await stack.enter_async_context(own)).pulls
            yield requests, agent
    except UntrustedServiceError:
        raise
    except ServiceUnreachableError as error:
        raise ServiceStoppedError(holder, error.address, error.reason) from error


def _is_own(socket: Path) -> bool:
    """Whether a process of this user made the socket: paths and grants go to no other user's agent. Blocking."""
    try:
        found = socket.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True)
class _RunningMirror:
    """The mirror of a service, which queries its upstreams.

    Its API reveals held content only to callers that the upstream admits now. The user of this command owns the data
    directory, so held content is read there, with a grant signed by the mirror's own key.
    """

    client: MirrorClient
    settings: MirrorSettings
    signer: GrantSigner
    organisation: str

    async def request(self, sources: Sequence[WeightsSource], _: str) -> Mirror:
        return await self.client.request(MirrorRequestBody(weights=[body_from(source) for source in sources]))

    async def follow(self, mirror_id: str, _: str, interval_seconds: float) -> AsyncGenerator[Mirror]:
        async for mirror in self.client.follow(mirror_id, interval_seconds, AT_ONCE):
            yield mirror

    async def held(self, wanted: WeightsSource, _: str, *, is_newest: bool) -> HeldSource | None:
        place = self.settings.usual_database
        found = await asyncio.to_thread(held_in, place, wanted, self.organisation, is_newest=is_newest)
        if found is None or found[0].manifest is None:
            return None
        manifest, revision = Digest.parse(found[0].manifest), found[0].resolved_revision
        mount = GrantedMount.at(wanted.mount_location, manifest, str(wanted.source), revision)
        grant = Grant(self.organisation, (mount,), time.time() + self.settings.grant_seconds)
        return HeldSource(*found, self.signer.sign(grant))

    async def is_update(self, manifest: str, wanted: WeightsSource, _: str) -> bool:
        place = self.settings.usual_database
        return await asyncio.to_thread(is_update_in, place, manifest, wanted, self.organisation)

    async def tree(self, source: HuggingFaceUri, _: str, *, is_held: bool) -> Sequence[HubFile]:
        return await self.client.tree(str(source), is_held=is_held)
