"""Every breakage that the mutation runs apply still finds the code that it breaks; otherwise a run would stop half-way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.promises.breakages import all_breakages

_ROOT = Path(__file__).parents[2]
_ROWS = [
    *((_ROOT / row.file, f"{row.promise}, {row.what}", row.old, row.new) for row in all_breakages()),
]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [pytest.param(file, old, new, id=f"{file.name}: {breakage}") for file, breakage, old, new in _ROWS],
)
def test_a_breakage_changes_one_place_and_leaves_a_program(file: Path, old: str, new: str) -> None:
    assert file.read_text().count(old) == 1
    assert new != old
    if file.suffix == ".py":
        ast.parse(file.read_text().replace(old, new))


def test_no_two_breakages_of_a_file_have_one_name() -> None:
    names = [(file, breakage) for file, breakage, _, _ in _ROWS]
    assert len(set(names)) == len(names)
