"""When the disk is full although room was promised: who took it?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from bdn.core.errors import DiskFailedError
from node_agent.background_tasks import in_thread
from node_agent.cache.space import Space


@asynccontextmanager
async def blaming(space: Space) -> AsyncIterator[None]:
    """Around fills whose room is promised: a disk that is full all the same says what others have taken meanwhile.

    Room that was promised and is not there is a neighbour's doing, or a bug of ours; whoever reads the error shall know which.
    """
    before = await in_thread(space.others)
    try:
        yield
    except DiskFailedError as error:
        if not error.is_full:
            raise
        found = error
        with suppress(DiskFailedError):  # a disk that cannot even be asked
            taken = await in_thread(space.others) - before
            found = replace(error, others_bytes=max(0, taken))
        raise found from error
