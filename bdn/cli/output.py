"""Output of programs: results on standard output, remarks and progress on standard error, and exit codes.

``--json`` prints one document, errors included; ``--quiet`` prints results alone. Modules that a command needs only
when it runs are imported then, so that ``--help`` does not wait for them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from bdn.core.errors import NAME_A_SECRET, BdnError, InvalidRequestError
from bdn.core.printable import printable
from bdn.core.units import format_age, format_duration, format_size, format_time

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from rich.console import Console  # 50 ms

    from bdn.net.client import OutageRetry
    from bdn.settings import SettingsError
    from bdn.wire.progress import Progress
    from bdn.wire.shapes import ErrorBody

    Document = BaseModel | dict[str, Any]

_Parsed = TypeVar("_Parsed")
_LINE_SECONDS: Final = 2.0  # between two lines of progress
_LEAST_BAR: Final = 8  # columns

# --- exit codes, as documented in docs/contract.md ---

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
IN_USE: Final = 3
NOT_FOUND: Final = 4
INTERRUPTED: Final = 130

_BY_CODE: Final = {
    "IN_USE": IN_USE,
    "NOT_FOUND": NOT_FOUND,
    "SOURCE_NOT_FOUND": NOT_FOUND,
    "REVISION_NOT_FOUND": NOT_FOUND,
    "SECRET_NOT_FOUND": NOT_FOUND,
    "INVALID_REQUEST": USAGE,
    "INVALID_SOURCE": USAGE,
    "INVALID_MOUNT": USAGE,
}


_OPTIONS: Final = {
    "allow_patterns": "--allow",
    "auth_secret_name": "--secret",
    "dry_run": "--dry-run",
    "expires_seconds": "--expires",
    "grace_seconds": "--grace",
    "ignore_patterns": "--ignore",
    "job_id": "--job",
    "lru_bytes": "--lru",
    "mount_location": "--mount",
    "ttl_seconds": "--ttl",
}


def in_options(text: str) -> str:
    """Replace the field names of requests in a service's message with the options of commands."""
    text = text.replace(NAME_A_SECRET, "Give --secret NAME")
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda found: _OPTIONS[found[1]], text)


def exit_code_of(error: BdnError) -> int:
    """By the error's code, so that reported errors count like our own."""
    return _BY_CODE.get(error.code, FAILED)


# --- results and errors ---


@dataclass(frozen=True, slots=True)
class Output:
    as_json: bool
    quiet: bool

    def result(self, document: Document, lines: Sequence[str], ids: Sequence[str] | None = None) -> None:
        """Print the document with ``--json``, its id or the ``ids`` when quiet, otherwise the lines."""
        if self.as_json:
            self._write(document)
            return
        own = getattr(document, "id", None)
        names = [own] if ids is None and own else ids
        for line in names if self.quiet and names is not None else lines:
            _echo(line)

    def say(self, line: str) -> None:
        if not self.quiet:
            _echo(line, err=True)

    def warn(self, line: str) -> None:
        """Printed even when quiet."""
        _echo(f"warning: {in_options(line)}", err=True)

    def fail(self, error: BdnError) -> int:
        if self.as_json:
            from bdn.wire.shapes import document_of  # noqa: PLC0415

            self._write(document_of(error))
        else:
            self.error(error)
        return exit_code_of(error)

    @staticmethod
    def error(error: BdnError | ErrorBody) -> None:
        """Printed even when quiet."""
        say_error(f"{in_options(error.message)} [{error.code}]")

    @property
    def wants_bars(self) -> bool:
        return not self.quiet and sys.stderr.isatty()

    def _write(self, document: Document) -> None:
        content = document if isinstance(document, dict) else document.model_dump(mode="json")
        for line in json.dumps(content, indent=2, ensure_ascii=False).split("\n"):
            _echo(line)  # escapes keep the exact value inside a JSON string


def _echo(line: str, *, err: bool = False) -> None:
    """The only place that prints: names and messages may come from outside."""
    click.echo(printable(line), err=err)


def say_error(problem: str) -> None:
    _echo(f"error: {problem}", err=True)


def say_wrong_settings(error: SettingsError) -> None:
    for line in f"error: {error}".split("\n"):
        _echo(line, err=True)


def say_interrupted() -> None:
    _echo("interrupted", err=True)


def table(rows: Sequence[Mapping[str, object]], empty: str | None = None) -> list[str]:
    """A header and a line for each row; ``empty`` alone without rows.

    The keys of all rows are the names of the columns. A column whose cells are all None is left out.
    """
    if not rows:
        return [] if empty is None else [empty]
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[name.upper() for name in names], *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def fields_of(document: BaseModel, names: str) -> dict[str, object]:
    """A row of ``table`` with these fields: without a unit in their names, and None for False."""
    row: dict[str, object] = {}
    for name in names.split():
        value = getattr(document, name)
        if name.endswith("_bytes"):
            value = None if value is None else format_size(value)
        row[re.sub("_(bytes|at)$", "", name).replace("_", " ")] = None if value is False else value
    return row


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return when(value)
    return "yes" if value is True else printable(str(value))


def when(at: datetime) -> str:
    """Absolute; on a terminal the relative time is beside it."""
    seconds = at.timestamp()
    absolute = format_time(seconds)
    if not sys.stdout.isatty():
        return absolute
    left = seconds - time.time()
    return f"{absolute} ({f'in {format_duration(left)}' if left > 0 else format_age(-left)})"


def check_usage(check: Callable[[], None]) -> None:
    """Check before any request that options go together. Raises ``UsageError``."""
    try:
        check()
    except InvalidRequestError as error:
        raise click.UsageError(printable(in_options(str(error)))) from None


def parsed(parse: Callable[[str], _Parsed]) -> Callable[[click.Context, click.Parameter, str | None], _Parsed | None]:
    """The callback of an option. ``parse`` raises ``ValueError`` for an invalid text."""

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> _Parsed | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(printable(str(error))) from error

    return callback


def command_line(function: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """Make a click callback of an async function that takes an ``Output`` first and returns an exit code (None: 0)."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
    @click.option("--quiet", "-q", is_flag=True, help="Print the result alone.")
    @wraps(function)
    def callback(*, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401 - click's own options
        from pydantic import ValidationError  # noqa: PLC0415

        from bdn.cli.logs import warn_on_stderr  # noqa: PLC0415
        from bdn.net.host_lookups import run_program  # noqa: PLC0415
        from bdn.settings import SettingsError  # noqa: PLC0415

        warn_on_stderr()
        output = Output(as_json, quiet)
        try:
            code = run_program(function(output, **options)) or 0
        except BdnError as error:
            code = output.fail(error)
        except (ValidationError, SettingsError) as error:
            problem = _describe(error) if isinstance(error, ValidationError) else str(error)
            if as_json:
                output.fail(InvalidRequestError(problem))
            elif isinstance(error, SettingsError):
                say_wrong_settings(error)
            else:
                say_error(problem)
            code = USAGE
        except KeyboardInterrupt:
            say_interrupted()
            code = INTERRUPTED
        sys.exit(code)

    return callback


def _describe(error: ValidationError) -> str:
    """The wrong fields of a request and their problems, without their values."""
    return "; ".join(f"{in_options(str(problem['loc'][-1]))}: {problem['msg']}" for problem in error.errors())


# --- while a command waits ---


def waiting_for(output: Output, what: str) -> OutageRetry:
    """Retries requests for ``what``, such as a mirror's id, and says so once."""
    from bdn.net.waiting import outage_retry  # noqa: PLC0415

    return outage_retry(what, output.say, output.warn)


Show = Callable[[int, int | None, int], object]


@contextmanager
def progress_bars(output: Output) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that shows a bar for each step, which begins now or where the step before has ended."""
    shown: dict[str, Show] = {}
    began = time.monotonic()
    with ExitStack() as stack:

        def report(progress: Progress) -> None:
            nonlocal began
            if progress.step not in shown:
                shown[progress.step] = stack.enter_context(progress_bar(output, progress.step, began))
            shown[progress.step](progress.bytes_done, progress.bytes_total, progress.bytes_moved)
            if progress.is_last:
                stack.close()
                began = time.monotonic()

        yield report


@contextmanager
def progress_bar(output: Output, title: str, began: float | None = None) -> Iterator[Show]:
    """Yields a function for bytes done, total bytes (None if unknown), and bytes moved since ``began`` (None: now)."""
    began = time.monotonic() if began is None else began
    if not output.wants_bars:
        yield _furthest(_Lines(output, title, began).update)
        return
    from rich.console import Console  # noqa: PLC0415 - only for terminals

    with bar_on(Console(stderr=True), title, began) as show:
        yield _furthest(show)


def _furthest(show: Show) -> Show:
    """Shows the maximum so far, and at most the total.

    Retried bytes were dropped before, at most one chunk per request; and only one of several replicas of a mirror knows
    the bytes under way, so a bar that followed each answer would jump back and forth.
    """
    most_done = most_moved = 0

    def forward(done: int, total: int | None, moved: int) -> None:
        nonlocal most_done, most_moved
        most_done, most_moved = max(most_done, done), max(most_moved, moved)
        show(most_done if total is None else min(most_done, total), total, most_moved)

    return forward


@contextmanager
def bar_on(console: Console, title: str, began: float) -> Iterator[Show]:
    """A bar that fills the terminal, followed by the figures that fit."""
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415

    title = printable(title)
    room = console.width - len(title) - _LEAST_BAR - 2  # a space on each side of the bar
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task(title, total=None, figures="")

        def show(done: int, total: int | None, moved: int) -> None:
            parts = _figures(done, total, moved, time.monotonic() - began)
            while len(parts) > 1 and len(", ".join(parts)) > room:
                parts.pop()
            progress.update(task, completed=done, total=total, figures=", ".join(parts))

        yield show


def _figures(done: int, total: int | None, moved: int, seconds: float) -> list[str]:
    """Bytes done, rate, and remaining time. The rate is left out while no bytes have moved."""
    parts = [format_size(done) + (f" of {format_size(total)}" if total is not None else "")]
    if moved > 0 and seconds > 0:
        rate = moved / seconds
        parts.append(f"{format_size(int(rate))}/s")
        if total is not None and total > done:
            parts.append(f"{format_duration((total - done) / rate)} left")
    return parts


class _Lines:
    """A line every two seconds, and one at the end."""

    def __init__(self, output: Output, title: str, began: float) -> None:
        self._output = output
        self._title = title
        self._began = self._last = began
        self._ended = False

    def update(self, done: int, total: int | None, moved: int) -> None:
        now = time.monotonic()
        at_end = total is not None and done >= total
        if self._ended or total == 0 or (not at_end and now - self._last < _LINE_SECONDS):
            return
        self._last, self._ended = now, at_end
        self._output.say(f"{self._title}: {', '.join(_figures(done, total, moved, now - self._began))}")
