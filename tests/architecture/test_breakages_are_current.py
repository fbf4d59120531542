"""Every breakage that the mutation runs apply still finds the code that it breaks; otherwise a run would stop half-way."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.support.promises.breakages import PAGE, Breakage, all_breakages, page

_ROOT = Path(__file__).parents[2]


def is_current(row: Breakage) -> bool:
    """Whether it changes one place, and leaves a program."""
    file = _ROOT / row.file
    if not file.exists() or file.read_text().count(row.old) != 1 or row.new == row.old:
        return False
    if file.suffix == ".py":
        ast.parse(file.read_text().replace(row.old, row.new))
    return True


def test_the_page_lists_them() -> None:
    assert PAGE.read_text() == page(), "write page() to PAGE, both of tests.support.promises.breakages"


def test_a_breakage_changes_one_place_and_leaves_a_program() -> None:
    assert [f"{row.file}: {row.what}" for row in all_breakages() if not is_current(row)] == []


def test_no_two_breakages_of_a_file_have_one_name() -> None:
    names = Counter((row.file, row.promise, row.what) for row in all_breakages())
    assert [name for name, count in names.items() if count > 1] == []
