"""How far the scrub is, on disk: a position and a few suspects, and nothing per file."""

from __future__ import annotations

import threading
from pathlib import Path

from pydantic import BaseModel

from bdn.core.cache.scrub_round import Position, ScrubbedTier, ScrubRound
from bdn.core.digest import Digest
from bdn.disk.durable import disk_errors, write_at_once
from node_agent.cache.quarantine import SuspectFiles


class _Body(BaseModel):
    began: float
    manifest: str | None = None
    tier: ScrubbedTier | None = None
    content: str | None = None
    ended: float | None = None
    suspects: list[str] = []


class ScrubRecord:
    """``round`` and ``suspects`` as they are now, and as the last ``save`` wrote them. Blocking.

    Lost with a power cut or damaged, it costs a round that begins anew.
    """

    def __init__(self, path: Path, suspects: SuspectFiles, now: float) -> None:
        self.round = ScrubRound(now)
        self.suspects = suspects
        self._path = path
        self._lock = threading.Lock()

    def load(self) -> None:
        """What the last run left."""
        try:
            body = _Body.model_validate_json(self._path.read_bytes())
            after = None
            if body.manifest and body.tier and body.content:
                after = Position(Digest.parse(body.manifest), body.tier, Digest.parse(body.content))
            suspects = [Digest.parse(content) for content in body.suspects]
        except (OSError, ValueError):
            return
        self.round = ScrubRound(body.began, after, body.ended)
        self.suspects.restore(suspects)

    def save(self) -> None:
        """Raises ``DiskFailedError``."""
        now, after = self.round, self.round.after
        body = _Body(
            began=now.began,
            manifest=str(after.manifest) if after else None,
            tier=after.tier if after else None,
            content=str(after.content) if after else None,
            ended=now.ended,
            suspects=[str(content) for content in self.suspects.all()],
        )
        with self._lock, disk_errors(self._path):
            write_at_once(self._path, body.model_dump_json().encode())
