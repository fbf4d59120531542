"""The demo's table: what each step took from which tier, and how fast."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from bdn.core.units import format_size
from bdn.wire.stage_schema import BytesFrom


class Step(BaseModel):
    """One row: what was done, the bytes that it took from each tier, and how long it took."""

    step: str
    outcome: str
    upstream: int = 0
    tiers: BytesFrom = BytesFrom()
    seconds: float
    bytes: int = 0

    @property
    def rate(self) -> float | None:
        """Gigabytes per second of the step's whole result; None where nothing was delivered."""
        return self.bytes / self.seconds / 1e9 if self.bytes else None


class Steps(BaseModel):
    """The demo's result."""

    steps: list[Step]


def print_table(steps: Sequence[Step]) -> None:
    """On standard output."""
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="bdn demo: bytes by tier")
    for heading in ("step", "result"):
        table.add_column(heading)
    for heading in ("upstream", "mirror", "cluster", "node", "seconds", "GB/s"):
        table.add_column(heading, justify="right")
    for step in steps:
        bytes_by_tier = (step.upstream, step.tiers.mirror, step.tiers.cluster, step.tiers.node)
        sizes = [format_size(size) if size else "-" for size in bytes_by_tier]
        rate = "-" if step.rate is None else f"{step.rate:.2f}"
        table.add_row(step.step, step.outcome, *sizes, f"{step.seconds:.3f}", rate)
    Console(width=None if Console().is_terminal else 120).print(table)
