"""A cluster tier without an agent around it."""

from bdn.core.cache.index import ChunkIndex
from bdn.disk.direct import DirectWrites
from node_agent.cache.cache_events import CacheEvents
from node_agent.cache.chunk_files import ChunkFiles
from node_agent.cache.cluster_tier import ClusterTier
from node_agent.disk.places import Places


def a_tier(places: Places, budget: int = 0) -> ClusterTier:
    """The tier of this directory, loaded; it tells nobody, and its clock stands still."""
    files = ChunkFiles(places.root / "cluster", DirectWrites())
    events = CacheEvents(lambda: None, lambda _reason, _count: None)
    tier = ClusterTier(files, ChunkIndex(), lambda: budget, lambda: 1000.0, events)
    tier.load()
    return tier
