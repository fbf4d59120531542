"""The table of docs/promises.md: every promise with the files of its tests, found by their marks.

``python -m tests.support.promises.page`` writes it anew; a test says when that is needed.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.promises.tally import PROMISES

ROOT: Final = Path(__file__).parents[3]
_MARK: Final = "pytest.mark.promise"
PAGE: Final = ROOT / "docs/promises.md"
TITLE: Final = "## Promises and their tests\n"
HEAD: Final = "\n| promise | shown by |\n|---|---|\n"


@cache
def marked(path: Path) -> set[str]:
    """The promises that tests of a file are marked with."""
    return _promises(_parsed(path))


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
            shown[name].append(f"[{path.stem.removeprefix('test_').replace('_', ' ')}](../{path.relative_to(ROOT)})")
    rows = "".join(f"| {sentence}. | {', '.join(shown[name])} |\n" for name, sentence in PROMISES.items())
    return TITLE + HEAD + rows + "\n"


def with_section(page: str) -> str:
    """The page with the section as it should stand, in its place. Raises ``ValueError`` for one that was cut off."""
    start = page.index(TITLE)
    return page[:start] + section() + page[page.index("\n## ", start) + 1 :]


if __name__ == "__main__":
    PAGE.write_text(with_section(PAGE.read_text()))
