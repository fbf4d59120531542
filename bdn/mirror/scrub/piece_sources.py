"""Where the right bytes of a damaged object may be had."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bdn.core.digest import digest_of
from bdn.core.store.damage import Piece


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
        ...
