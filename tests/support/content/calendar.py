"""Days that pass at once."""

import time
from dataclasses import dataclass
from typing import Final

DAY: Final = 86400.0  # seconds


@dataclass
class Calendar:
    """The real clock, and so many days more."""

    days: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.days * DAY
