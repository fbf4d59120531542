"""A running agent, as its API and embedding commands see it."""

from __future__ import annotations

from dataclasses import dataclass

from node_agent.cache.node_cache import NodeCache
from node_agent.disk.fitness import check_fitness
from node_agent.disk.places import Places
from node_agent.journal import Journal
from node_agent.metrics import Metrics
from node_agent.mirror_link.evictions import Evictions
from node_agent.mirror_link.heartbeats import Heartbeats
from node_agent.mirror_link.holdings import Holdings
from node_agent.scrubbing import Scrub
from node_agent.settings import AgentSettings
from node_agent.stage.housekeeping import Housekeeping
from node_agent.stage.stages import Stages
from node_agent.trust import Trust


@dataclass(frozen=True)
class Agent:
    """The parts that others talk to; ``open_agent`` makes them and takes them down."""

    settings: AgentSettings
    places: Places
    cache: NodeCache
    journal: Journal
    stages: Stages
    evictions: Evictions
    holdings: Holdings
    housekeeping: Housekeeping
    scrub: Scrub
    heartbeats: Heartbeats
    trust: Trust
    metrics: Metrics
    data_port: int

    def check_ready(self) -> None:
        """Whether new stages have a chance. Blocking. Raises ``DiskFailedError``."""
        check_fitness(self.places.root)
