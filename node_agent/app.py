"""The agent put together: ``open_agent`` reads from top to bottom, from the disk to the mirror."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bdn.core.pace.retry import RetryPolicy
from bdn.net.client.mirror_client import MirrorClient
from node_agent.agent import Agent
from node_agent.background_tasks import BackgroundTasks
from node_agent.cache.node_cache import Clock
from node_agent.delivery import Delivery, open_delivery
from node_agent.duties import Duties, duties_of
from node_agent.fetch.deadlines import Waits
from node_agent.ground import open_ground
from node_agent.jobs import Jobs, open_jobs, stages_of
from node_agent.metrics import Metrics
from node_agent.scrubbing import Scrub, open_scrub
from node_agent.settings import AgentSettings
from node_agent.stage.stage import StageBook


@asynccontextmanager
async def open_agent(
    settings: AgentSettings,
    *,
    clock: Clock = time.time,
    elapsed: Clock = time.monotonic,
    policy: RetryPolicy | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[Agent]:
    """A running agent: its disk is scanned and its stages go on. Leaving the context drains it; stages survive.

    Raises:
        SettingsError: these settings do not go together.
        InvalidRequestError: the cache directory is of a format that this version does not know.
        InUseError: another agent has this cache directory, or another program the data port.
        DiskFailedError: the cache directory cannot be used.
    """
    settings.check()
    async with AsyncExitStack() as stack:
        book = StageBook()
        ground = await open_ground(stack, settings, book, Metrics(book), clock)

        # bytes → cache → jobs
        client = await stack.enter_async_context(MirrorClient(settings.url, settings.token))
        delivery = await open_delivery(stack, ground, client, policy or RetryPolicy(), waits or Waits())
        jobs = await open_jobs(stack, ground, delivery.provision, elapsed)

        # disk → soundness, mirror → duties
        scrub = await open_scrub(ground, delivery, jobs)
        duties = duties_of(ground, delivery, jobs, scrub, client)
        stages = stages_of(ground, jobs, duties.heartbeats.ask_for_keys)

        await _start(stack, delivery, jobs, scrub, duties)
        yield Agent(
            settings=settings,
            places=ground.disk.places,
            cache=ground.cache,
            journal=ground.journal,
            stages=stages,
            evictions=duties.evictions,
            holdings=duties.holdings,
            housekeeping=jobs.housekeeping,
            scrub=scrub,
            heartbeats=duties.heartbeats,
            trust=ground.trust,
            metrics=ground.metrics,
            data_port=delivery.server.port,
        )


async def _start(stack: AsyncExitStack, delivery: Delivery, jobs: Jobs, scrub: Scrub, duties: Duties) -> None:
    """Stages first, then peers, then the mirror; and the other way round at the end."""
    stack.callback(delivery.let_go)
    stack.callback(jobs.let_go)
    await jobs.housekeeping.resume()
    delivery.server.start()
    stack.push_async_callback(duties.heartbeats.leave)
    background = await stack.enter_async_context(BackgroundTasks())
    stack.callback(scrub.stop.set)
    duties.start(background)
    background.start(jobs.housekeeping.run(), "housekeeping")
    background.start(scrub.rounds.run(), "scrub")
