"""Rows as documents: a mirror with its rate, its estimate and, once READY, its grant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from bdn.core.digest import Digest
from bdn.core.grant import Grant, GrantedMount
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.wire.errors import ErrorBody
from bdn.wire.grants import GrantSigner
from bdn.wire.mirror_schema import Mirror, MirrorSource
from bdn.wire.shapes import moment


@dataclass(frozen=True)
class MirrorViews:
    """Makes documents. A grant is made anew for each look at a READY mirror and is never stored."""

    database: Database
    signer: GrantSigner
    grant_seconds: int

    async def of(self, found: Sequence[tuple[MirrorRow, list[MirrorSourceRow]]]) -> list[Mirror]:
        """The documents of these mirrors."""
        ready: dict[str, list[str]] = {}
        for row, sources in found:
            if row.status == "READY":
                ready.setdefault(row.organisation, []).extend(source.manifest for source in sources if source.manifest)
        async with self.database.read() as session:
            held = {name: await mirrors.readable(session, name, sorted(set(own))) for name, own in ready.items()}
        return [self._of(row, sources, held.get(row.organisation, set())) for row, sources in found]

    def _of(self, row: MirrorRow, sources: list[MirrorSourceRow], held: AbstractSet[str]) -> Mirror:
        known = [source for source in sources if source.bytes_total is not None]
        complete = len(known) == len(sources)
        bytes_total = sum(source.bytes_total or 0 for source in known) if complete else None
        transferred = sum(source.bytes_transferred for source in sources)
        reused = sum(source.bytes_reused for source in sources)
        rate = self._rate(row, transferred)
        left = None if bytes_total is None else max(0, bytes_total - transferred - reused)
        return Mirror.model_validate(
            {
                "id": row.id,
                "status": row.status,
                "created_at": moment(row.created_at),
                "started_at": row.started_at and moment(row.started_at),
                "completed_at": row.completed_at and moment(row.completed_at),
                "files_total": sum(source.files_total or 0 for source in known) if complete else None,
                "bytes_total": bytes_total,
                "bytes_transferred": transferred,
                "bytes_reused": reused,
                "bytes_per_second": rate,
                "eta_seconds": left / rate if left is not None and rate and row.status == "SYNCING" else None,
                "grant": self._grant(row, sources, held) if row.status == "READY" else None,
                "error": row.error,
                "sources": [_source(source) for source in sources],
            }
        )

    @staticmethod
    def _rate(row: MirrorRow, transferred: int) -> float | None:
        if row.started_at is None or not transferred:
            return None
        return transferred / max(0.001, (row.completed_at or time.time()) - row.started_at)

    def _grant(self, row: MirrorRow, sources: list[MirrorSourceRow], held: AbstractSet[str]) -> str | None:
        """None when a manifest may no longer be read: a grant for it would promise what nobody can deliver."""
        if not all(source.manifest in held for source in sources):
            return None
        mounts = tuple(
            GrantedMount(source.mount_location, Digest(source.manifest), source.source)
            for source in sources
            if source.manifest
        )
        return self.signer.sign(Grant(row.organisation, mounts, time.time() + self.grant_seconds))


def _source(row: MirrorSourceRow) -> MirrorSource:
    return MirrorSource.model_validate(
        {
            "source": row.source,
            "mount_location": row.mount_location,
            "status": row.status,
            "resolved_revision": row.resolved_revision,
            "manifest": row.manifest and f"b3:{row.manifest}",
            "files_total": row.files_total,
            "bytes_total": row.bytes_total,
            "bytes_transferred": row.bytes_transferred,
            "bytes_reused": row.bytes_reused,
            "warnings": row.warnings,
            "error": row.error and ErrorBody.model_validate(row.error),
        }
    )
