"""Which changes are made, and that the same seed makes the same."""

import ast
from pathlib import Path

import pytest

from tests.mutation.__main__ import nearest
from tests.mutation.mutations import chosen, mutations_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("source", "changed"), [
    ("f(1)", ["pass", "f(0)", "f(2)"]), ("await f()", ["pass"]), ("logger.info(1)", []), ("'words'", []),
    ("if x:\n    y", ["if True:\n    y", "if False:\n    y"]), ("while x: y", ["while False: y"]),
    ("a = b < c", ["a = ((b) <= (c))"]), ("a = b not in c", ["a = ((b) in (c))"]), ("a = not b", ["a = (b)"]),
    ("a = b and c", ["a = ((b))", "a = ((c))"]), ("a = b + c", ["a = ((b) - (c))"]), ("a = True", ["a = False"]),
    ("a = max(b, c)", ["a = (b)", "a = (c)"]), ("a = f(b, c=d)", ["a = f(b)"]), ("a.b = c", ["pass"]),
    ("a += b", ["pass"]), ("raise a(1)", ["pass"]), ("a = [b for b in c if d]", ["a = [b for b in c if True]"]),
    ("def f(a: int = 1) -> 2: 'says'", ["def f(a: int = 0) -> 2: 'says'", "def f(a: int = 2) -> 2: 'says'"]),
    ("a = '\u00fc' if b else 'x'", ["a = '\u00fc' if True else 'x'", "a = '\u00fc' if False else 'x'"]),
])  # fmt: skip
def test_code_is_changed_and_words_and_types_are_not(source: str, changed: list[str]) -> None:
    assert sorted(one.of(source) for one in mutations_of(source)) == sorted(changed)


def test_every_change_of_a_real_file_is_a_program_and_the_seed_decides_which_are_made() -> None:
    source = (ROOT / "node_agent/fetch/bandwidth.py").read_text()
    every = mutations_of(source)
    for one in every:
        assert one.of(source) != source
        ast.parse(one.of(source))
    assert chosen(every, 10, seed=1) == chosen(every, 10, seed=1) != chosen(every, 10, seed=2)
    assert len(chosen(every, 10_000, seed=1)) == len(every)


def test_the_nearest_tests_are_those_that_import_the_file_itself() -> None:
    found = nearest(ROOT / "node_agent/fetch/bandwidth.py", ROOT)
    assert set(found[:2]) == {"tests/unit/node_agent/test_bandwidth.py", "tests/unit/node_agent/test_ordered_limit.py"}
    assert "tests/integration/test_agent_prefetch.py" in found
