"""Records of the database that were found wrong, by a reader or by the scrub, and wait for their repair.

Known to this process alone: a record says of itself that it is wrong, to whoever reads it, so nothing is lost with the list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from bdn.core.errors import StoreUnavailableError
from bdn.mirror.damages import DAMAGE
from bdn.mirror.db.records import Record
from bdn.mirror.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RecordDamagedError(StoreUnavailableError):
    """The store is there, and what the database says of this is wrong."""

    record: str

    def __str__(self) -> str:
        return (
            f"{self.record} is damaged in the mirror's database and is not served ({self.reason}); it is repaired from agents or "
            "the upstream where they have it: see 'bdn-admin verify', or mirror its source again"
        )


@dataclass(frozen=True)
class Suspects:
    """Shared by readers and the keeper."""

    watch: Watch
    found: dict[Record, str] = field(default_factory=dict)

    def add(self, record: Record, fault: str) -> None:
        """It is wrong, and is to be repaired."""
        if record not in self.found:
            self.found[record] = fault
            logger.warning("a record of the database is damaged", extra={"record": str(record), "reason": fault})
        self.watch.notify(DAMAGE)

    def refuse(self, record: Record, fault: str) -> RecordDamagedError:
        """What a reader is told instead."""
        self.add(record, fault)
        return RecordDamagedError(fault, str(record))
