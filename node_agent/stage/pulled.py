"""The directories that pulls publish, at paths of the user's choice. A directory holds its stage's lease until it is gone.

Imports little, for ``standing.py``.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bdn.core.errors import InvalidRequestError
from node_agent.cache.records import CacheFiles
from node_agent.stage.stage import NodeStage, StageRecord, StageRegistry
from node_agent.stage.view.destination import Destination, Earlier
from node_agent.stage.view.hub import HubSnapshot


@dataclass(frozen=True)
class PulledDirectories:
    """Records are of pulls. Methods block."""

    registry: StageRegistry
    files: CacheFiles

    def published_at(self, path: Path) -> Earlier | None:
        """The last pull to the present directory, whatever changed in it since. Checks no files."""
        inode = Destination(path, "", self.files.whole, 0).inode()
        records = [stage.record for stage in self.registry.all() if stage.record.destination == path]
        here = [record for record in records if inode is not None and record.inode == inode]
        return self._published(here[0]) if here else None

    def is_standing(self, record: StageRecord, *, link: bool) -> bool:
        """Whether the directory is exactly as published, by a pull with the same ``link``."""
        if record.state != "READY" or not record.is_linked(link):
            return False
        earlier = self._published(record)
        return earlier is not None and self.at(record).is_intact(earlier)

    def is_abandoned(self, record: StageRecord) -> bool:
        """Whether the directory is gone or replaced by another."""
        return record.inode is None or self.at(record).inode() != record.inode

    def ready(self) -> list[NodeStage]:
        stages = (stage for stage in self.registry.all() if stage.record.destination is not None)
        return [stage for stage in stages if stage.record.state == "READY" and not stage.is_working]

    def abandoned(self) -> list[NodeStage]:
        return [stage for stage in self.ready() if self.is_abandoned(stage.record)]

    def at(self, record: StageRecord) -> Destination | HubSnapshot:
        assert record.destination is not None  # noqa: S101 - called for pulls only
        if record.hub:
            return HubSnapshot(record.destination, record.id, self.files.whole)
        return Destination(record.destination, record.id, self.files.whole, record.stamp, record.link)

    def clear(self, record: StageRecord) -> None:
        """Remove what an unfinished pull left; the published files belong to the user."""
        destination = self.at(record)
        with suppress(InvalidRequestError), destination.claimed():  # refused: another pull works there
            destination.clear()

    def _published(self, record: StageRecord) -> Earlier | None:
        if record.inode is None:
            return None
        digest = record.mounts[0].digest
        return Earlier(record.inode, digest, self.files.records.manifest(digest), record.stamp)
