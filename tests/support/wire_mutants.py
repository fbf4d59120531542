"""Breaks a copy of ``bdn`` in many small ways and asks the tests of wire, transfer and store to notice each of them.

``python -m tests.support.wire_mutants [WORD]`` tries all, or those whose file or breakage holds WORD, prints what survived, and,
when it tried all, writes ``docs/mutants-wire.md``. It never touches the working tree's package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.wire_breakages import BREAKAGES

TESTS = {
    "store": ["tests/unit/store", "tests/contract/test_memory_store.py", "tests/contract/test_directory_store.py"],
    "transfer": ["tests/unit/transfer", "tests/contract/test_chunk_readers.py"],
    "wire": ["tests/unit/wire"],
}
HEADER = """# Breakages that the tests catch

## Wire, transfer and store

Each row is one small change to a file of `bdn` that makes it wrong, and the first test that fails because of it. Made by
`python -m tests.support.wire_mutants`, which applies every breakage to a copy.

| file | breakage | caught by |
|---|---|---|
"""


def first_failure(copy: Path, tests: list[str]) -> str:
    """The name of the first failing test, or nothing when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return "a test that waits for ever"
    if result.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*/(test_\w+)\.py(?:::(?:\w+::)?(\w+))?", result.stdout, re.MULTILINE)
    return (found[2] or found[1]) if found else f"exit status {result.returncode}"


def caught_by(root: Path, file: str, old: str, new: str) -> str:
    """The first test that notices, if any does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("bdn", "tests/support", "tests/doubles", "tests/contract", "tests/unit"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", copy)
        broken = copy / "bdn" / file
        source = broken.read_text()
        if source.count(old) != 1:
            msg = f"{file}: {old!r} stands there {source.count(old)} times; the list of breakages is stale"
            raise ValueError(msg)
        broken.write_text(source.replace(old, new))
        return first_failure(copy, TESTS[file.partition("/")[0]])


def main() -> int:
    """Exit status 1 when a breakage was not noticed."""
    root = Path(__file__).parents[2]
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    rows, survivors = [], 0
    for file, breakage, old, new in BREAKAGES:
        if word not in f"{file} {breakage}":
            continue
        caught = caught_by(root, file, old, new)
        survivors += not caught
        rows.append(f"| `bdn/{file}` | {breakage} | {f'`{caught}`' if caught else '**nothing**'} |")
        print(rows[-1], flush=True)
    if not word:
        (root / "docs/mutants-wire.md").write_text(HEADER + "\n".join(rows) + "\n")
    print(f"{len(rows)} breakages, {survivors} not caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
