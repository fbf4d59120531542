"""What commands print of names and messages from outside: a terminal never acts on them."""

import io
import json
import logging
import sys
from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from bdn.cli.output import Output, bar_on, command_line, progress_bar, table, when
from bdn.core.errors import UpstreamUnavailableError

HOSTILE = "a\nwarning: b\r\t\x1b[2J\x1b]0;title\x07\x7f\x9b31m\u202ecod.exe\u2028\udc80 ünïcödé 模型"
ESCAPED = (
    "a\\nwarning: b\\r\\t\\u001b[2J\\u001b]0;title\\u0007\\u007f\\u009b31m\\u202ecod.exe\\u2028\\udc80 ünïcödé 模型"
)
PEOPLE = Output(as_json=False, quiet=False)
QUIET = Output(as_json=False, quiet=True)
PROGRAMS = Output(as_json=True, quiet=False)


def test_a_result__with_hostile_names__has_a_line_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    PEOPLE.result({}, [HOSTILE, "two"])
    QUIET.result({}, [], [HOSTILE])

    assert capsys.readouterr() == (f"{ESCAPED}\ntwo\n{ESCAPED}\n", "")


def test_a_document__with_hostile_names__is_the_same_when_parsed_and_plain_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    PROGRAMS.result({"name": HOSTILE, HOSTILE: 1}, [])

    printed = capsys.readouterr().out
    assert json.loads(printed) == {"name": HOSTILE, HOSTILE: 1}
    assert printed.replace("\n", "").isprintable()


def test_remarks_and_errors__with_hostile_names__are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    PEOPLE.say(HOSTILE)
    PEOPLE.warn(HOSTILE)
    PEOPLE.fail(UpstreamUnavailableError("hub", HOSTILE))

    said, warned, failed = capsys.readouterr().err.splitlines()
    assert (said, warned) == (ESCAPED, f"warning: {ESCAPED}")
    assert failed.startswith("error: ")
    assert ESCAPED in failed


def test_progress__of_a_hostile_title__is_printed_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(PEOPLE, HOSTILE) as show:
        show(5, 5, 0)
    terminal = io.StringIO()
    with bar_on(Console(file=terminal, force_terminal=True, width=200), HOSTILE, 0.0) as show:
        show(5, 5, 0)

    assert capsys.readouterr().err == f"{ESCAPED}: 5 B of 5 B\n"
    assert ESCAPED in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()


def test_a_table__has_a_header_and_no_column_without_values() -> None:
    rows: list[dict[str, object]] = [
        {"name": "a\n", "size": 1, "error": None},
        {"name": "bcd", "size": None, "error": None},
    ]
    assert table(rows, "none") == ["NAME  SIZE", "a\\n   1", "bcd   -"]
    assert table([], "none") == ["none"]


@pytest.mark.parametrize(("seconds", "beside"), [(-150, " (2 min ago)"), (7250, " (in 2h)")], ids=["past", "future"])
def test_a_time__on_a_terminal__has_the_relative_one_beside_it(
    seconds: int, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    assert when(at) == f"{at:%Y-%m-%d %H:%M:%S}Z"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert when(at) == f"{at:%Y-%m-%d %H:%M:%S}Z{beside}"


def test_a_command__that_logs_a_warning__prints_it_on_one_line_with_what_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    @command_line
    async def failing(output: Output) -> None:
        logging.getLogger("bdn").warning("not pushed: %s", HOSTILE, extra={"checkpoint": HOSTILE})
        output.result({}, ["done"])

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a command's process
    ran = CliRunner().invoke(failing)

    assert ran.output.splitlines() == [f'warning: not pushed: {ESCAPED} checkpoint="{ESCAPED}"', "done"]
