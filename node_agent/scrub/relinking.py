"""A file that another one has replaced in the cache is replaced in the views that show it, too: nobody else would tell them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.digest import Digest
from node_agent.disk.places import Places
from node_agent.scrub.staged_files import StagedFiles
from node_agent.stage.stage import Stage

logger = logging.getLogger(__name__)
_ALREADY_DUE: Final = 0.0  # by the agent's monotonic clock


@dataclass(frozen=True)
class Relinking:
    """Name by name: the folders of a view stay, and so does what a job has open or mapped. Blocking."""

    places: Places
    staged: StagedFiles

    def look(self, path: Path) -> os.stat_result | None:
        """Which file stands there now; None when none does."""
        with suppress(OSError):
            return path.lstat()
        return None

    def replace(self, content: Digest, earlier: os.stat_result) -> None:
        """Let every view that links to the ``earlier`` file of a content link to the present one.

        A stage where that fails is noted as lacking something, and housekeeping stages it again.
        """
        for stage, path in self._showing(content, earlier):
            aside = self.places.views / f"{stage.record.id}.relinking"  # a kill leaves it to the tidying of a start
            try:
                aside.unlink(missing_ok=True)
                aside.hardlink_to(self.places.file(content))
                aside.rename(path)
            except OSError as error:
                logger.warning("%s still shows the earlier file %s: %s", path, content, error)
                stage.mend_at = _ALREADY_DUE

    def leave(self, content: Digest, earlier: os.stat_result) -> None:
        """There is no other file yet: whoever brings it, the stages that show the ``earlier`` one lack it until they are mended."""
        for stage, _ in self._showing(content, earlier):
            if stage.mend_at is None:
                stage.mend_at = _ALREADY_DUE

    def _showing(self, content: Digest, earlier: os.stat_result) -> Iterator[tuple[Stage, Path]]:
        for stage, path in self.staged.named(content):
            with suppress(OSError):
                if os.path.samestat(path.lstat(), earlier):
                    yield stage, path
