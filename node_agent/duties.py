"""What the mirror hears of this node, and what it asks of it: prefetches, verifications and evictions."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from bdn import __version__
from bdn.net.client.mirror_client import MirrorClient
from node_agent.background_tasks import BackgroundTasks
from node_agent.delivery import Delivery
from node_agent.disk.cache_directory import boot_id
from node_agent.ground import Ground
from node_agent.jobs import Jobs
from node_agent.mirror_link.evictions import Evictions
from node_agent.mirror_link.heartbeats import Heartbeats, Identity
from node_agent.mirror_link.holdings import Holdings
from node_agent.mirror_link.prefetches import Prefetches
from node_agent.scrubbing import Scrub
from node_agent.settings import AgentSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Duties:
    """Heartbeats bring the mirror's commands and carry the reports away."""

    holdings: Holdings
    heartbeats: Heartbeats
    evictions: Evictions

    def start(self, background: BackgroundTasks) -> None:
        """Begin; they end with the background."""
        self.heartbeats.start(background, self.evictions.carry_out)


def duties_of(ground: Ground, delivery: Delivery, jobs: Jobs, scrub: Scrub, client: MirrorClient) -> Duties:
    """Nothing is said yet."""
    settings, book, cache, tier = ground.settings, ground.book, ground.cache, ground.tier
    holdings = Holdings(ground.disk.places, cache, tier, settings.roles, book, ground.disk.writes)
    prefetches = Prefetches(jobs.background, delivery.provision, cache, ground.trust, ground.news.wake)
    heartbeats = Heartbeats(
        _identity(settings, delivery.server.port),
        client,
        trust=ground.trust,
        members=ground.members,
        holdings=holdings,
        prefetches=prefetches,
        verifications=scrub.verifications,
        news=ground.news,
        journal=ground.journal,
    )
    evictions = Evictions(settings.cluster, settings.node, book, jobs.lifecycle, cache, tier, prefetches.cancel)
    return Duties(holdings, heartbeats, evictions)


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
