"""BDN from Python: pull files to a directory, mirror sources, and stage them for a job on this node.

``Client`` blocks, ``AsyncClient`` is the same for ``asyncio``; docs/python.md has both. Errors are those of the
contract, as classes of ``bdn.core.errors`` with ``code``, ``message``, ``retryable`` and ``details()``.
"""

from bdn.client.async_client import AsyncClient, AsyncPendingMirror
from bdn.client.client import Client, PendingMirror
from bdn.client.staged import StagedFiles
from bdn.local.pulled import Pulled
from bdn.wire.mirror_schema import Mirror
from bdn.wire.progress import Progress
from bdn.wire.stage_schema import JobStage

__all__ = [
    "AsyncClient",
    "AsyncPendingMirror",
    "Client",
    "JobStage",
    "Mirror",
    "PendingMirror",
    "Progress",
    "Pulled",
    "StagedFiles",
]
