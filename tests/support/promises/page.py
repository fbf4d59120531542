"""The README's section *What we promise*: every promise with the files of its tests, found by their marks.

``python -m tests.support.promises.page`` writes it anew; a test says when that is needed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.promises.tally import PROMISES

ROOT: Final = Path(__file__).parents[3]
_MARK: Final = "pytest.mark.promise"
TITLE: Final = "## What we promise\n"
HEAD: Final = """
Each line is held by the tests beside it, which `make test` runs small and `make fault` large: with 10,000 restarts of the
state machine, 300 kills of real processes, power cuts, wrong bytes, broken disks and networks, and a table of what was tried and seen.
Its soak and its search by coverage are of `make fault` alone, and `BDN_SOAK_SECONDS=3600` makes the soak an hour long. Tests that
mount file systems want root and `/dev/fuse`; the table counts what was skipped.

`python -m tests.support.promises.breakages` breaks each promise on purpose and asks the tests; [the list of breakages](docs/mutants-promises.md)
names what each of them catches. [What was tried and seen](docs/promises.md) has the table of the last full run and the figures of an
hour's soak.

| promise | shown by |
|---|---|
"""


@cache
def marked(path: Path) -> set[str]:
    """The promises that tests of a file are marked with."""
    return _promises(_parsed(path))


def marked_tests(path: Path) -> set[str]:
    """Its tests that are about a promise, by their names."""
    module = _parsed(path)
    is_every = any(isinstance(node, ast.Assign) and _promises(node) for node in module.body)
    return {
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if is_every or any(map(_promises, node.decorator_list))
    }


def _parsed(path: Path) -> ast.Module:
    """The file, empty if it has nothing about a promise: most have nothing."""
    text = path.read_text()
    return ast.parse(text if _MARK in text else "")


def _promises(tree: ast.AST) -> set[str]:
    return {
        str(argument.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == _MARK
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


def section() -> str:
    """The section as it should stand."""
    shown: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in marked(path):
            shown[name].append(f"[{path.stem.removeprefix('test_').replace('_', ' ')}]({path.relative_to(ROOT)})")
    rows = "".join(f"| {sentence}. | {', '.join(shown[name])} |\n" for name, sentence in PROMISES.items())
    return TITLE + HEAD + rows + "\n"


def with_section(readme: str) -> str:
    """The README with the section as it should stand, in its place. Raises ``ValueError`` for one that was cut off."""
    start = readme.index(TITLE)
    return readme[:start] + section() + readme[readme.index("\n## ", start) + 1 :]


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(with_section(page.read_text()))
