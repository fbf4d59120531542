"""Right bytes come back under a damaged name: from agents first, from the upstream if they have none."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from bdn.core.chunk import Digest, FileLayout, Slab, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import Needed, Piece, closed_up, seal_of
from bdn.mirror.damages import Damages
from bdn.mirror.db import contents, mirrors, origins
from bdn.mirror.db.database import Database

logger = logging.getLogger(__name__)
AGAIN_SECONDS: Final = 300.0


@dataclass
class Restoring:
    """One object while its pieces come together, and why somebody could not give one."""

    buffer: bytearray
    missing: list[Piece]
    _reasons: list[tuple[str, str | None]] = field(default_factory=list)

    def note(self, reason: str, organisation: str | None = None) -> None:
        """Somebody could not give a piece. The reason names a source of this organisation, or nobody's."""
        self._reasons.append((reason, organisation))

    def reason(self, asking: str | None = None) -> str:
        """All of them, as an organisation may hear them; None is the log."""
        told = [
            reason if asking is None or owner in (None, asking) else "another organisation's source cannot give it"
            for reason, owner in self._reasons
        ]
        return "; ".join(dict.fromkeys(told)) or "neither an agent nor a READY source has it"

    def place(self, piece: Piece) -> memoryview:
        """Where the piece's bytes belong."""
        return memoryview(self.buffer)[piece.offset : piece.offset + piece.size]

    def take(self, piece: Piece) -> bool:
        """Whether what lies in the piece's place is the piece; then it is not missing any more."""
        if digest_of(self.place(piece)) != piece.name:
            return False
        self.missing.remove(piece)
        return True


class PieceSource(Protocol):
    """Somebody who may have pieces."""

    async def bring(self, restoring: Restoring) -> None:
        """Bring what is missing as far as possible. Failures are reasons, not errors."""


@dataclass(frozen=True)
class Repair:
    """Repairs one object at a time. Nothing but its own bytes is read.

    The first of the ``sources`` may have a slab as a whole; the others have files.
    """

    database: Database
    damages: Damages
    sources: Sequence[PieceSource]
    clock: Callable[[], float]
    _tried_at: dict[Digest, float] = field(default_factory=dict)

    def is_due(self, digest: Digest) -> bool:
        """Whether it is worth an attempt of our own accord: who could not give it a moment ago cannot now."""
        tried_at = self._tried_at.get(digest)
        return tried_at is None or not 0 <= self.clock() - tried_at < AGAIN_SECONDS

    def leave(self, digest: Digest) -> None:
        """Somebody asked not to repair this: for a while it is left as it is."""
        self._tried_at[digest] = self.clock()

    async def run(self, digest: Digest, asking: str | None = None) -> str | None:
        """None once the store holds it again, or nothing needs it; otherwise why it cannot be had.

        That may be that the store does not take it. The reason is one that the organisation ``asking`` may hear: it names no
        source of others.

        Raises:
            StoreUnavailableError: the store or the database is away; whatever was damaged still is.
        """
        self._tried_at[digest] = self.clock()
        if await self.damages.examine(digest) is None:
            return None
        async with self.database.read() as session:
            needed = await origins.needed(session, digest.hex)
        if needed is None:
            return None  # what it belonged to was collected; the next collection takes what is left of it
        restoring = await self._restore(needed)
        if restoring.missing:
            said = {"chunk": str(digest), "reason": restoring.reason()}
            logger.warning("a damaged chunk cannot be repaired", extra=said)
            await self.damages.give_up(digest)
            return restoring.reason(asking)
        try:
            if digest_of(restoring.buffer) == digest:
                await asyncio.to_thread(self.damages.store.put, digest, restoring.buffer)
            else:
                await self._pack_again(needed, restoring)
        except StoreUnavailableError as error:
            logger.warning("a damaged chunk cannot be replaced", extra={"chunk": str(digest), "error": str(error)})
            await self.damages.examine(digest)  # raises when it is the store that is away
            return str(error)
        await self.damages.heal()
        return await self.damages.reason(digest)

    async def _restore(self, needed: Needed) -> Restoring:
        """The object as a whole where somebody has it as a whole; otherwise piece by piece."""
        restoring = Restoring(bytearray(needed.size), [needed.whole])
        if needed.is_slab:
            await self.sources[0].bring(restoring)
            if not restoring.missing:
                return restoring
            buffer = bytearray(needed.size)
            buffer[needed.size - len(needed.seal) :] = needed.seal
            restoring = Restoring(buffer, list(needed.pieces))
        for source in self.sources:
            if restoring.missing:
                await source.bring(restoring)
        return restoring

    async def _pack_again(self, needed: Needed, restoring: Restoring) -> None:
        """Files went out of the slab since it was packed: those that are left make a new one, for the same readers."""
        placed = closed_up(needed.pieces)
        files = b"".join(restoring.place(piece) for piece, _ in placed)
        slabs = [await self._put_slab(files, scope) for scope in needed.scopes or ()]
        async with self.database.write() as session:
            await mirrors.hold_claims(session)
            if await origins.needed(session, needed.digest.hex) != needed:
                return  # an eviction came between: next time
            await contents.record_slabs(session, slabs)
            for slab in slabs:
                layouts = [FileLayout.packed(piece.content, piece.size, slab, offset) for piece, offset in placed]
                await contents.record_slices(session, layouts)
            await self.damages.drop_slab(session, needed.digest.hex)
        self.damages.on_repaired()

    async def _put_slab(self, files: bytes, scope: str) -> Slab:
        content = files + seal_of(scope)
        digest = digest_of(content)
        await asyncio.to_thread(self.damages.store.put, digest, memoryview(content))
        return Slab(digest, len(content), scope)
