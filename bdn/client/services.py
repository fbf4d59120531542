"""A mirror and the agent of this machine: requests, and waits for their ends."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.tls import Authorities
from bdn.net.waiting import grant_of, last_mirror, last_stage, ready_mirror
from bdn.settings import ClientSettings
from bdn.wire.http_fields import LONGEST_WAIT_SECONDS
from bdn.wire.mirror_schema import Mirror
from bdn.wire.named_sources import request_body
from bdn.wire.progress import Report
from bdn.wire.stage_schema import StageDocument, StageRequest, StageView


def mirror_client(settings: ClientSettings) -> MirrorClient:
    authorities = Authorities(settings.tls_ca)
    return MirrorClient(settings.url, settings.token, organisation=settings.organisation, authorities=authorities)


def agent_client(settings: ClientSettings) -> AgentClient:
    return AgentClient(f"unix:{settings.effective_agent_socket}")


@dataclass(frozen=True)
class Services:
    """``outages`` makes the retries of requests for a mirror or a stage, by its id."""

    mirrors: MirrorClient
    agent: AgentClient
    outages: Callable[[str], OutageRetry]

    async def last_mirror(self, mirror_id: str, report: Report | None) -> Mirror:
        return await last_mirror(self.mirrors.follow(mirror_id, outages=self.outages(mirror_id)), report)

    async def begin_stage(
        self,
        mirror: str,
        job_id: str,
        *,
        ttl_seconds: float | None,
        warm: bool,
        report: Report | None,
        view: StageView = "files",
    ) -> StageDocument:
        """``mirror`` is the id of a mirror, or a checkpoint, which is mirrored first: that moves nothing."""
        if mirror.startswith("bt://"):
            begun = await self.mirrors.request(request_body((mirror,)))
            found = ready_mirror(await self.last_mirror(begun.id, report))
        else:
            found = await self.mirrors.mirror(mirror, LONGEST_WAIT_SECONDS)
        grant = grant_of(found)
        request = StageRequest(job_id=job_id, grant=grant, view=view, ttl_seconds=ttl_seconds, warm=warm)
        return await self.agent.stage(request)

    async def last_stage(self, stage_id: str, report: Report | None) -> StageDocument:
        return await last_stage(self.agent.follow(stage_id, outages=self.outages(stage_id)), report)

    async def close(self) -> None:
        await self.mirrors.close()
        await self.agent.close()


@asynccontextmanager
async def open_services(settings: ClientSettings, outages: Callable[[str], OutageRetry]) -> AsyncIterator[Services]:
    async with mirror_client(settings) as mirrors, agent_client(settings) as agent:
        yield Services(mirrors, agent, outages)
