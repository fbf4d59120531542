"""The agent put together: ``open_agent`` reads from top to bottom, from the disk to the mirror."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from bdn import __version__
from bdn.core.pace.retry import RetryPolicy
from bdn.wire.client import MirrorClient
from node_agent.agent import Agent
from node_agent.cache.node_cache import Clock
from node_agent.crew import Crew, in_thread
from node_agent.delivery import Delivery, open_delivery
from node_agent.disk.owner import boot_id
from node_agent.evictions import Evictions
from node_agent.ground import open_ground
from node_agent.heartbeat import Heartbeats, Identity
from node_agent.holdings import Holdings
from node_agent.metrics import Metrics
from node_agent.news import News
from node_agent.prefetches import Prefetches
from node_agent.ring.patience import Waits
from node_agent.scrubbing import open_scrub
from node_agent.settings import AgentSettings
from node_agent.stage.book import StageBook
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.lifecycle import Lifecycle
from node_agent.stage.pulls import Pulls
from node_agent.stage.record import StageRecords
from node_agent.stage.stages import Stages
from node_agent.stage.staging import Staging
from node_agent.stage.warm import Warmer
from node_agent.view.exposure import choose, exposures
from node_agent.view.views import Views

logger = logging.getLogger(__name__)


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
        book, news = StageBook(), News()
        metrics = Metrics(book)
        ground = await open_ground(stack, settings, metrics, news, clock)
        places, cache, tier, trust = ground.places, ground.cache, ground.tier, ground.trust
        client = await stack.enter_async_context(MirrorClient(settings.url, settings.token))
        delivery = await open_delivery(
            stack,
            settings,
            ground,
            client=client,
            metrics=metrics,
            policy=policy or RetryPolicy(),
            waits=waits or Waits(),
        )
        provision, data_port = delivery.provision, delivery.server.port
        metrics.watch(
            "bdn_agent_direct_writes", "1 when files are written past the page cache", lambda: ground.writes.are_direct
        )

        # Stages.
        views = Views(places, exposures(places), await in_thread(choose, settings.exposure, places))
        stage_records, pulls = StageRecords(places), Pulls(book, ground.manifests, places)
        crew = await stack.enter_async_context(Crew())
        staging, warmer = Staging(provision, views, places), Warmer(crew, book, views, settings.warm_rate)
        lifecycle = Lifecycle(
            crew,
            staging,
            warmer,
            cache=cache,
            views=views,
            records=stage_records,
            pulls=pulls,
            clock=clock,
            elapsed=elapsed,
            on_ready=metrics.ready,
            on_change=news.tell,
            decided=ground.journal.record,
        )
        housekeeping = Housekeeping(
            book, lifecycle, stage_records, ground.manifests, cache, tier, views, pulls, clock, ground.is_rebooted
        )

        # What the mirror is told, and what it asks for.
        holdings = Holdings(places, cache, tier, settings.roles, book, ground.writes)
        prefetches = Prefetches(crew, provision, cache, trust, news.wake)
        scrub = await open_scrub(
            crew,
            settings,
            ground,
            delivery,
            book=book,
            views=views,
            metrics=metrics,
            clock=clock,
            wake=news.wake,
        )
        heartbeats = Heartbeats(
            _identity(settings, data_port),
            client,
            trust=trust,
            members=ground.members,
            holdings=holdings,
            prefetches=prefetches,
            verifications=scrub.verifications,
            news=news,
            journal=ground.journal,
        )
        evictions = Evictions(settings.cluster, settings.node, book, lifecycle, cache, tier, prefetches.cancel)
        keys, is_node = heartbeats.ask_for_keys, "node" in settings.roles
        stages = Stages(book, lifecycle, stage_records, views, pulls, trust, keys, clock, is_node)

        # Go.
        stack.callback(_let_go, book, delivery)
        await housekeeping.resume()
        delivery.server.start()
        stack.push_async_callback(heartbeats.leave)
        background = await stack.enter_async_context(Crew())
        stack.callback(scrub.stop.set)
        heartbeats.start(background, evictions.carry_out)
        background.start(housekeeping.run(), "housekeeping")
        background.start(scrub.rounds.run(), "scrub")
        yield Agent(
            settings=settings,
            places=places,
            cache=cache,
            journal=ground.journal,
            stages=stages,
            evictions=evictions,
            holdings=holdings,
            housekeeping=housekeeping,
            scrub=scrub,
            heartbeats=heartbeats,
            trust=trust,
            metrics=metrics,
            data_port=data_port,
        )


def _let_go(book: StageBook, delivery: Delivery) -> None:
    """Before tasks are canceled: threads that copy or wait for the network shall notice, so that nobody waits for them."""
    for stage in book.all():
        stage.stop.set()
    delivery.let_go()


def _identity(settings: AgentSettings, data_port: int) -> Identity:
    advertise = settings.advertised(data_port)
    if advertise is None and "cluster" in settings.roles:
        logger.warning(
            "peers on other machines cannot reach the data plane on %s, so this agent owns no chunks of its cluster: "
            "set BDN_AGENT_HOST or BDN_AGENT_ADVERTISE",
            settings.host,
        )
    return Identity(
        node=settings.node,
        cluster=settings.cluster,
        boot_id=boot_id(),
        roles=list(settings.roles),
        advertise=advertise,
        version=__version__,
    )
