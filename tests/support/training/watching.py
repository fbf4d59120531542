"""Whoever lists a job's checkpoints without a pause while it writes, and pulls each version that becomes visible."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.services.commands import Shell, wait_until
from tests.support.training.writing import LONGEST_SECONDS, Writer


@dataclass(frozen=True)
class Version:
    """A checkpoint as it was listed, and the folder into which it was pulled."""

    listed: dict[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        return str(self.listed["checkpoint_id"])


@dataclass
class Watcher:
    """Of one job. Folders of what it pulled are below ``folder``, and are named like the checkpoints."""

    shell: Shell
    job: str
    folder: Path
    versions: list[Version] = field(default_factory=list)

    def listed(self) -> list[dict[str, Any]]:
        return list(self.shell.told("bdn", "checkpoints", "ls", self.job)["items"])

    def look(self) -> None:
        """Pull what was not seen before. One that is replaced in this moment is seen at the next look."""
        known = {(one.listed["source"], one.listed["manifest"]) for one in self.versions}
        for listed in self.listed():
            if (listed["source"], listed["manifest"]) in known:
                continue
            place = self.folder / str(len(self.versions)) / listed["checkpoint_id"]
            place.parent.mkdir(parents=True)
            done = self.shell.told("bdn", "checkpoints", "pull", listed["source"], str(place))
            if done["mounts"][0]["manifest"] == listed["manifest"]:
                self.versions.append(Version(listed, place))

    def until(self, writer: Writer, condition: Callable[[], object], what: str) -> None:
        """Look on until this is so. A writer that fails fails here."""

        def is_so() -> object:
            self.look()
            writer.has_ended()
            return condition()

        wait_until(is_so, seconds=LONGEST_SECONDS, what=what)

    def seen(self, name: str) -> int:
        """How many versions of a checkpoint became visible."""
        return sum(one.name == name for one in self.versions)
