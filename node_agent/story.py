"""What this agent can say by itself: what a path of a view is, and what was decided here about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePosixPath

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.wire.event_schema import EventDocument, NodeEvents, StagedPath
from node_agent.app import Agent
from node_agent.background_tasks import in_thread
from node_agent.stage.record import MountRecord
from node_agent.stage.stage import NodeStage


@dataclass(frozen=True)
class Story:
    """The service behind ``GET /events`` of the control API."""

    agent: Agent

    async def of_path(self, path: str, limit: int) -> NodeEvents:
        """What the path is, and the events of its manifest. A stage that was released is known for a week.

        Raises:
            NotFoundError: no stage ever showed it, or its manifest has no such file.
        """
        staged = await self._staged(PurePosixPath(path))
        return NodeEvents(staged=staged, items=await self._items(staged.manifest, limit))

    async def of(self, mention: str, limit: int) -> NodeEvents:
        """The events that mention a digest or a name; with nothing to look for, all."""
        return NodeEvents(items=await self._items(mention, limit))

    async def _items(self, mention: str, limit: int) -> list[EventDocument]:
        settings = self.agent.settings
        found = await in_thread(lambda: list(islice(self.agent.journal.events(mention), limit)))
        return [EventDocument.of(replace(one, cluster=settings.cluster, node=settings.node)) for one in found]

    async def _staged(self, path: PurePosixPath) -> StagedPath:
        stage, mount, name = self._find(path)
        manifest = await in_thread(self.agent.cache.files.records.load, mount.digest)
        inside = {} if manifest is None else {entry.path: entry for entry in manifest.files}
        is_folder = name == "." or any(other.startswith(f"{name}/") for other in inside)
        entry = inside.get(name)
        if manifest is not None and entry is None and not is_folder:
            raise NotFoundError(f"{name} of manifest {mount.manifest}")
        return StagedPath(
            path=str(path),
            stage=self.agent.stages.document(stage),
            mount_location=mount.mount_location,
            manifest=mount.manifest,
            name=name,
            digest=str(entry.digest) if entry else None,
            size=entry.size if entry else None,
            cached=self._is_cached(entry.digest if entry else None, mount),
        )

    def _find(self, path: PurePosixPath) -> tuple[NodeStage, MountRecord, str]:
        """The stage that shows the path now, or else the one that was asked for last."""
        if not path.is_absolute():
            raise InvalidRequestError(f"{path} is not an absolute path")
        stages = sorted(self.agent.stages.registry.all(), key=lambda stage: stage.record.state != "READY")
        for stage in stages:
            for mount in stage.record.mounts:
                root = stage.record.destination or self.agent.stages.lifecycle.views.place(
                    stage.record.id, mount.mount_location
                )
                if path.is_relative_to(root):
                    return stage, mount, str(path.relative_to(root))
        raise NotFoundError(f"a stage of this node that shows {path}")

    def _is_cached(self, content: Digest | None, mount: MountRecord) -> bool:
        index = self.agent.cache.index
        return index.is_complete(mount.digest) if content is None else index.ledger.is_committed(content)
