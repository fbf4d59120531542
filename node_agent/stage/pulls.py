"""Views at directories of the user's choice, whose leases are held by the directories themselves."""

from dataclasses import dataclass
from pathlib import Path

from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places
from node_agent.stage.stage import NodeStage, StageRecord, StageRegistry
from node_agent.stage.view.destination import Destination, Earlier


@dataclass(frozen=True)
class Pulls:
    """What the stages say about directories, compared with the directories. Methods look at the disk and block."""

    registry: StageRegistry
    manifests: ManifestRecords
    places: Places

    def destination(self, record: StageRecord) -> Destination:
        """The directory of a pulled stage."""
        if record.destination is None:
            raise ValueError(f"stage {record.id} is not a pull")
        return Destination(record.destination, record.id, self.places)

    def earlier(self, path: Path) -> Earlier | None:
        """What we published at ``path`` last, whether its stage still stands or not."""
        for stage in self.registry.all():
            if stage.record.destination == path and stage.record.inode is not None:
                return self._earlier(stage.record)
        return None

    def stands_at(self, path: Path) -> bool:
        """Whether the directory there is one that we published, whatever happened in it since. Looks at no file."""
        inode = Destination(path, "", self.places).inode()
        return inode is not None and any(
            stage.record.destination == path and stage.record.inode == inode for stage in self.registry.all()
        )

    def is_intact(self, record: StageRecord) -> bool:
        """Whether the directory is still exactly what was published."""
        earlier = self._earlier(record)
        return earlier is not None and self.destination(record).is_intact(earlier)

    def is_abandoned(self, record: StageRecord) -> bool:
        """Whether the holder of the lease is gone: there is no directory, or it is another one."""
        return record.inode is None or self.destination(record).inode() != record.inode

    def abandoned(self) -> list[NodeStage]:
        """The pulled stages whose directories are gone."""
        return [stage for stage in self._ready() if self.is_abandoned(stage.record)]

    def replaced_by(self, record: StageRecord) -> list[NodeStage]:
        """The stages whose view stood where this one's stands now."""
        return [
            stage
            for stage in self._ready()
            if stage.record.destination == record.destination and stage.record.id != record.id
        ]

    def _ready(self) -> list[NodeStage]:
        return [
            stage
            for stage in self.registry.all()
            if stage.record.destination is not None and stage.record.state == "READY" and not stage.is_working
        ]

    def _earlier(self, record: StageRecord) -> Earlier | None:
        if record.inode is None:
            return None
        digest = record.mounts[0].digest
        return Earlier(record.inode, digest, self.manifests.load(digest))
