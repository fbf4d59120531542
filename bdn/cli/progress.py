"""Progress for people: bars on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from bdn.cli.output import Output
from bdn.core.units import format_size

_LINE_SECONDS = 2.0


class Bar(Protocol):
    """One thing that grows towards a total that may not be known yet."""

    def update(self, done: int, total: int | None) -> None:
        """Show how far it is, in bytes."""
        ...


@contextmanager
def progress_bar(output: Output, title: str) -> Iterator[Bar]:
    """A bar until the block ends."""
    if not output.wants_bars:
        yield _Lines(output, title)
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)

        class _RichBar:
            def update(self, done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

        yield _RichBar()


class _Lines:
    """A line every two seconds, and one when it is done."""

    def __init__(self, output: Output, title: str) -> None:
        self._output = output
        self._title = title
        self._started = self._last = time.monotonic()
        self._ended = False

    def update(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        at_end = total is not None and done >= total
        if self._ended or (not at_end and now - self._last < _LINE_SECONDS):
            return
        self._last, self._ended = now, at_end
        of = f" of {format_size(total)}" if total is not None else ""
        rate = format_size(int(done / max(0.001, now - self._started)))
        self._output.say(f"{self._title}: {format_size(done)}{of}, {rate}/s")
