"""What a command prints: results on standard output, everything else on standard error.

``--json`` prints one document, errors included; ``--quiet`` prints results alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import click
from pydantic import BaseModel, ValidationError

from bdn.cli.exit_codes import INTERRUPTED, USAGE, exit_code_of
from bdn.core.errors import BdnError, InvalidRequestError
from bdn.net.host_lookups import run_program
from bdn.settings import SettingsError
from bdn.wire.errors import document_of

Document = BaseModel | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's words go."""

    as_json: bool
    quiet: bool

    def result(self, document: Document, lines: Sequence[str]) -> None:
        """The outcome: the document with ``--json``, otherwise the lines."""
        if self.as_json:
            self._write(document)
        else:
            for line in lines:
                click.echo(line)

    def say(self, line: str) -> None:
        """A remark on standard error."""
        if not self.quiet:
            click.echo(line, err=True)

    def warn(self, line: str) -> None:
        """A warning, said even when quiet."""
        click.echo(f"warning: {line}", err=True)

    def fail(self, error: BdnError) -> int:
        """Print the error and return the exit code."""
        if self.as_json:
            self._write(document_of(error))
        else:
            click.echo(f"error: {error} [{error.code}]", err=True)
        return exit_code_of(error)

    @property
    def wants_bars(self) -> bool:
        """Whether somebody looks at a terminal."""
        return not self.quiet and sys.stderr.isatty()

    def _write(self, document: Document) -> None:
        content = document.model_dump(mode="json") if isinstance(document, BaseModel) else document
        click.echo(json.dumps(content, indent=2, ensure_ascii=False))


class Checked(Protocol):
    """A request whose parts may contradict each other."""

    def check(self) -> None:
        """Raises ``InvalidRequestError``."""
        ...


def check_usage(request: Checked) -> None:
    """Options that do not go together are a matter of usage, found out before anything is asked. Raises ``UsageError``."""
    try:
        request.check()
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from None


def command_line(function: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """Make a click callback of an async function that takes an ``Output`` first and returns an exit code (None is 0)."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
    @click.option("--quiet", "-q", is_flag=True, help="Print the result alone.")
    @wraps(function)
    def callback(*, as_json: bool, quiet: bool, **options: Any) -> None:  # noqa: ANN401 - click's own options
        output = Output(as_json, quiet)
        try:
            code = run_program(function(output, **options)) or 0
        except BdnError as error:
            code = output.fail(error)
        except (ValidationError, SettingsError) as error:
            problem = _describe(error) if isinstance(error, ValidationError) else error
            click.echo(f"error: {problem}", err=True)
            code = USAGE
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        sys.exit(code)

    return callback


def _describe(error: ValidationError) -> str:
    """Which environment variables, or which fields of a request, are wrong, and how, without their values."""
    names = ("_".join(map(str, problem["loc"])) for problem in error.errors())
    if error.title.endswith("Settings"):
        names = (f"BDN_{name.upper()}" for name in names)
    return "; ".join(f"{name}: {problem['msg']}" for name, problem in zip(names, error.errors(), strict=True))
