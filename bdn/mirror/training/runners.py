"""What the controller needs of a runner: agents with the role ``job``, or pods of Kubernetes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from bdn.core.errors import BdnError
from bdn.core.training.placement import Node
from bdn.mirror.db.database import WriteSession
from bdn.mirror.db.tables import TrainingJobRow

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs the ranks of jobs. What it does follows from the rows, and may be repeated, also by several processes."""

    async def start(
        self, session: WriteSession, row: TrainingJobRow, nodes: Sequence[Node], gpus: int, now: float
    ) -> None:
        """Give a placed job, whose row is locked, its ranks: one on each node, with so many GPUs."""

    async def look(self, rows: Sequence[TrainingJobRow], now: float) -> None:
        """Carry out what the ranks of these active jobs want, and record what became of them."""

    async def stop(self, row: TrainingJobRow) -> None:
        """End what runs of a job, whose end is decided. Repeated until its ranks are over."""


@contextmanager
def surviving(job: str | None = None, on_outage: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A failure of one job ends neither the controller nor other jobs. ``on_outage``: the database is away."""
    facts = {} if job is None else {"job": job}
    try:
        yield
    except BdnError as error:
        on_outage()
        logger.warning("cannot advance training jobs now; retrying", extra={**facts, "error": str(error)})
    except Exception:
        logger.exception("advancing training jobs failed; retrying", extra=facts)
