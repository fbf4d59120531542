"""Files of a job on this node."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bdn.core.errors import InvalidRequestError
from bdn.net.waiting import ready_stage
from bdn.wire.shapes import ReportedError
from bdn.wire.stage_schema import StageDocument


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """Where the files of a READY stage are: read-only, until it is released.

    Example::

        with client.stage(mirror, job="train-42") as files:
            print(files.path, files.paths)
    """

    stage: StageDocument

    @classmethod
    def of(cls, stage: StageDocument) -> Self:
        """Raises the error with which the stage failed, or with which it lacks something."""
        if (error := ready_stage(stage).error) is not None:
            raise ReportedError(error)
        return cls(stage)

    @property
    def paths(self) -> dict[str, Path]:
        """The directories by mount location."""
        return {mount.mount_location: Path(mount.path) for mount in self.stage.mounts}

    @property
    def path(self) -> Path:
        """The directory of a stage of one source. Raises ``InvalidRequestError`` if it has more."""
        if len(self.stage.mounts) != 1:
            raise InvalidRequestError(
                f"stage {self.stage.id} has {len(self.stage.mounts)} mounts: select one of 'paths'"
            )
        return Path(self.stage.mounts[0].path)
