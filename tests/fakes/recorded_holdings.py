"""An agent's holdings, as a mirror records them: the rule of ``HoldingsChange``, without a database."""

from dataclasses import dataclass, field

from bdn.wire.heartbeat_schema import HoldingsChange
from bdn.wire.mirror_schema import Holding


@dataclass
class RecordedHoldings:
    """``test_a_change_is_taken_up_when_it_is_of_what_the_mirror_has`` states the same rule of a real mirror."""

    digest: str = ""
    held: dict[str, Holding] = field(default_factory=dict)  # by manifest

    def record(self, change: HoldingsChange | None) -> str:
        if change is not None and change.base in (None, self.digest):
            kept = {} if change.base is None else {k: v for k, v in self.held.items() if k not in change.gone}
            self.held, self.digest = kept | {one.manifest: one for one in change.held}, change.digest
        return self.digest
