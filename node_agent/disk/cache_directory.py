"""The cache directory of a running agent: taken, of a format that it knows, and tried."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from bdn.disk.direct import DirectWrites
from bdn.disk.durable import disk_errors
from node_agent.background_tasks import in_thread
from node_agent.disk.aside import Aside
from node_agent.disk.format import check_format, keep_format
from node_agent.disk.owner import owned
from node_agent.disk.places import Places


@dataclass(frozen=True)
class CacheDirectory:
    """``is_rebooted`` when the machine was started anew since an agent had it last."""

    places: Places
    writes: DirectWrites
    aside: Aside
    is_rebooted: bool


async def open_cache_directory(stack: AsyncExitStack, places: Places) -> CacheDirectory:
    """Take it until the stack ends.

    Raises:
        InvalidRequestError: it is of a format that this version does not know.
        InUseError: another agent has it.
        DiskFailedError: it cannot be used.
    """
    await in_thread(check_format, places)
    with disk_errors(places.root):
        await in_thread(places.make)
    is_rebooted = stack.enter_context(owned(places.owner))
    await in_thread(keep_format, places)
    writes = DirectWrites()
    await in_thread(writes.probe, places.filling)
    return CacheDirectory(places, writes, Aside(), is_rebooted)
