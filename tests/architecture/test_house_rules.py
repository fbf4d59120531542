"""House rules that no linter knows, held by looking at the code itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("bdn", "node_agent") for path in (ROOT / folder).rglob("*.py"))
LONGEST_FILE = 300  # lines; the numbers only go down
LONGEST_FUNCTION = 40  # lines without the docstring


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


CATALOGUES = {"bdn/core/errors.py", "bdn/mirror/db/tables.py"}  # one class per error, or per table, and nothing to cut


def test_files_stay_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}

    assert {path: count for path, count in lines.items() if count > LONGEST_FILE and path not in CATALOGUES} == {}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_functions_stay_short() -> None:
    long = {
        f"{path}:{node.name}": lines
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, Function) and (lines := own_lines(node)) > LONGEST_FUNCTION
    }

    assert long == {}


def own_lines(function: Function) -> int:
    """Without the docstring, and without functions inside, which are counted for themselves."""
    documented = len(docstring.splitlines()) + 1 if (docstring := ast.get_docstring(function)) else 0
    inside = sum(own_lines(node) for node in function.body if isinstance(node, Function))
    return (function.end_lineno or 0) - function.lineno + 1 - documented - inside


def test_every_way_out_of_the_sources_passes_the_egress_guard() -> None:
    """A module that makes a client for an upstream names the guard of its kind."""
    guards = {
        "ClientSession": "guarded_connector",
        "create_client": "guarded_options",
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


def test_statements_stand_in_repositories_alone() -> None:
    allowed = {"bdn/mirror/repository", "bdn/mirror/db/tables.py", "bdn/mirror/db/database.py"}
    elsewhere = [
        str(path)
        for path, tree in parsed()
        if str(path).startswith("bdn/mirror")
        and not any(str(path).startswith(place) for place in allowed)
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert ast.get_docstring(tree) or path.name == "__init__.py"
