"""Breaks a copy of ``bdn/mirror`` in many small ways and asks the mirror's tests to notice each of them.

``python -m tests.support.mirror_mutants [WORD]`` tries all, or those whose file or breakage holds WORD, prints what survived,
and, when it tried all, writes ``docs/mutants-mirror.md``. It never touches the working tree's package.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.mirror_breakages import BREAKAGES, Breakage

_HEADER = """# Breakages that the mirror's tests catch

Each row is one small change to a file of `bdn/mirror` that makes it wrong, and the first test that fails because of it. Made
by `python -m tests.support.mirror_mutants`, which applies every breakage to a copy.

| file | breakage | caught by |
|---|---|---|
"""


def copy_of(root: Path, folder: Path) -> Path:
    """What the tests need, without what a break could reach in the working tree."""
    for part in ("bdn", "migrations", "node_agent", "tests"):
        shutil.copytree(root / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(root / file, folder)
    return folder


def caught_by(copy: Path, row: Breakage) -> str:
    """The first test that fails, or nothing when all pass."""
    broken = copy / "bdn/mirror" / row.file
    source = broken.read_text()
    if source.count(row.old) != 1:
        msg = f"{row.file}: {row.old!r} stands there {source.count(row.old)} times; the list of breakages is stale"
        raise ValueError(msg)
    broken.write_text(source.replace(row.old, row.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", row.tests]
    try:
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "they do not end"
    finally:
        broken.write_text(source)
    if result.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR|SUBFAILED\S*) \S*::(\w+)", result.stdout, re.MULTILINE)
    return found[1] if found else f"exit status {result.returncode}"


def main() -> int:
    """Exit status 1 when a breakage was not noticed."""
    root = Path(__file__).parents[2]
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    rows, survivors = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, Path(folder))
        for row in BREAKAGES:
            if word not in f"{row.file} {row.breakage}":
                continue
            caught = caught_by(copy, row)
            survivors += not caught
            rows.append(f"| `{row.file}` | {row.breakage} | {f'`{caught}`' if caught else '**nothing**'} |")
            print(rows[-1], flush=True)
    if not word:
        (root / "docs/mutants-mirror.md").write_text(_HEADER + "\n".join(rows) + "\n")
    print(f"{len(rows)} breakages, {survivors} not caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
