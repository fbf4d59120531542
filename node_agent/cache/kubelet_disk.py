"""Warns of a cache that can fill the kubelet's disk.

The kubelet evicts pods when its file system has less than 10 % free, or 15 % where images are on it, and it cannot delete
a cache (kubernetes#35017): the node then stays under disk pressure.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from node_agent.settings import AgentSettings

logger = logging.getLogger(__name__)
_LEAST_PERCENT: Final = 15
_DIRECTORY: Final = Path("/var/lib/kubelet")
_IN_A_POD: Final = Path("/etc/hosts")  # a file of the kubelet's directory, which it binds there


def kubelet_place(environ: Mapping[str, str] = os.environ) -> Path:
    """A path on the kubelet's file system, which a pod does not see by its own name. It may not exist."""
    return _IN_A_POD if "KUBERNETES_SERVICE_HOST" in environ else _DIRECTORY


def warn_of_kubelet(settings: AgentSettings, cache: Path, kubelet: Path) -> None:
    """Log a warning if both are on one file system and the cache leaves too little of it. Blocking."""
    try:
        is_shared = cache.stat().st_dev == kubelet.stat().st_dev
        disk = os.statvfs(cache)
    except OSError:
        return  # no kubelet here
    total = disk.f_blocks * disk.f_frsize
    headroom = settings.headroom_of(total)
    if is_shared and headroom < total * _LEAST_PERCENT // 100:
        logger.warning(
            "the cache %s is on the kubelet's disk and leaves %.1f %% of it free; the kubelet evicts pods below %d %%: set "
            "BDN_AGENT_HEADROOM_PERCENT=20, or give the cache a disk of its own",
            cache,
            headroom * 100 / total,
            _LEAST_PERCENT,
        )
