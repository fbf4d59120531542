"""What the prolog leaves for the tasks of a job: ``<jobs>/<job id>/environment`` or ``<jobs>/<job id>/error``.

``TaskProlog`` runs as the job's user and prints these files. Root owns the folders; a file is readable by the job's
user alone. A folder exists from before the job's first stage until after its last one, so a stage of this cluster
without a folder is left over: its node crashed, or its epilog could not reach the agent.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_STAGES_OF: Final = "slurm-"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job on this node, as slurmd describes it to prolog and epilog."""

    id: int
    restarts: int
    uid: int
    gid: int
    nodes: int
    comment: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Raises ``KeyError``, ``ValueError``: slurmd did not start this process."""
        return cls(
            id=int(environment["SLURM_JOB_ID"]),
            restarts=int(environment.get("SLURM_JOB_RESTART_COUNT", "0")),
            uid=int(environment["SLURM_JOB_UID"]),
            gid=int(environment["SLURM_JOB_GID"]),
            nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
            comment=environment.get("SLURM_JOB_COMMENT", ""),
        )

    @property
    def stages(self) -> str:
        """The job of its stages for the agent."""
        return f"{_STAGES_OF}{self.id}"


@dataclass(frozen=True, slots=True)
class JobFolders:
    root: Path

    def make(self, job: SlurmJob) -> None:
        """Empty, also if the job was here before. Raises ``OSError``."""
        self.remove(job)
        self.root.mkdir(mode=0o755, exist_ok=True)
        self._of(job).mkdir(mode=0o755)

    def has(self, stages: str) -> bool:
        """Whether stages of this job are expected; True for stages that are not of a Slurm job."""
        number = stages.removeprefix(_STAGES_OF)
        is_ours = stages.startswith(_STAGES_OF) and number.isascii() and number.isdecimal()
        return not is_ours or (self.root / number).is_dir()

    def leave(self, job: SlurmJob, name: str, lines: Sequence[str]) -> None:
        """Write a file for the job's user. Raises ``OSError``."""
        whole = self._of(job) / name
        aside = whole.with_name(f".{name}")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o400)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            os.fchown(descriptor, job.uid, job.gid)
        aside.rename(whole)

    def remove(self, job: SlurmJob) -> None:
        shutil.rmtree(self._of(job), ignore_errors=True)

    def _of(self, job: SlurmJob) -> Path:
        return self.root / str(job.id)
