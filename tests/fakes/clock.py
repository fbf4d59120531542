"""A clock that only the test moves."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds since the epoch. Each reading adds ``step``; ``advance`` then calls what is in ``then``."""

    now: float = 1_800_000_000.0
    step: float = 0.0
    then: list[Callable[[], None]] = field(default_factory=list)

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for act in self.then:
            act()
