"""House rules that no linter knows, held by looking at the code itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("bdn", "node_agent") for path in (ROOT / folder).rglob("*.py"))


@cache
def parsed() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in SOURCES]


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_every_way_out_of_the_sources_passes_the_egress_guard() -> None:
    """A module that makes a client for an upstream names the guard of its kind."""
    guards = {
        "ClientSession": "guarded_connector",
        "create_client": "guarded_config",
        "TCPConnector": None,
        "create_connection": None,
        "open_connection": None,
        "urlopen": None,
        "HTTPConnection": None,
        "HTTPSConnection": None,
        "PoolManager": None,
        "AsyncClient": None,
    }
    unguarded = [
        f"{path}:{line} {name}"
        for path, tree in parsed()
        if path.parts[:2] == ("bdn", "sources")
        for line, name in calls(tree)
        if (last := name.rpartition(".")[2]) in guards
        and not any(called.rpartition(".")[2] == guards[last] for _, called in calls(tree))
    ]

    assert unguarded == []


def test_tasks_are_started_in_groups_alone() -> None:
    loose = [
        f"{path}:{line} {name}"
        for path, tree in parsed()
        for line, name in calls(tree)
        if name in ("asyncio.create_task", "asyncio.gather", "loop.create_task")
    ]

    assert loose == []


def test_commands_print_through_one_module_that_escapes_names_from_outside() -> None:
    raw = (
        "click.echo",
        "click.secho",
        "click.echo_via_pager",
        "print",
        "sys.stdout.write",
        "sys.stderr.write",
        "Console",
    )
    elsewhere = [
        f"{path}:{line} {name}"
        for path, tree in parsed()
        for line, name in calls(tree)
        if name in raw and path != Path("bdn/cli/output.py")
    ]

    assert elsewhere == []


def test_statements_stand_in_the_database_folder_alone() -> None:
    elsewhere = [
        str(path)
        for path, tree in parsed()
        if not path.is_relative_to("bdn/mirror/db")
        and any(
            isinstance(node, ast.ImportFrom)
            and node.module == "sqlalchemy"
            and {alias.name for alias in node.names} & STATEMENTS
            for node in ast.walk(tree)
        )
    ]

    assert elsewhere == []


STATEMENTS = {"select", "insert", "update", "delete", "text"}


def test_no_file_is_named_after_nothing() -> None:
    banned = {"utils", "helpers", "common", "manager", "handler", "data", "info", "misc"}

    assert [path for path in SOURCES if path.stem in banned] == []
