"""Breaks a copy of the project in one way after the other, and asks the test that should notice.

``python -m tests.support.promises.breakages [WORD]`` tries all, or those whose file or breakage holds WORD, after it has seen their
tests pass on a copy that is whole, prints what was noticed, how, and what was not, and writes
``docs/mutants-promises.md``. It never touches what it breaks.
"""

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tests.breakages

AT_ONCE = 3  # most tests wait for processes that they start
COPIED = ("bdn", "node_agent", "migrations", "tests", "docs", "pyproject.toml", "README.md", "Makefile")
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/mutants-promises.md"
HEADER = """# Breakages that the tests of the promises catch

Each row is one small change that makes the code break a promise of promises.md, and the tests that fail because of it. The page lists
the rows of tests/breakages. `python -m tests.support.promises.breakages` applies them one after the other to a copy, and names each that
goes unnoticed; words after it select rows.
"""
_OF_THREAD = threading.local()
# These notice in `make fault`, and perhaps not in `make test`.
FULL = {
    "test_a_search_guided_by_coverage_finds_nothing[range]",
    "test_nothing_grows_under_a_mixed_load",
    "test_whatever_fails_while_a_job_writes_checkpoints_each_that_is_listed_is_one_that_it_left",
}


@dataclass(frozen=True)
class Breakage:
    """One change: ``old``, which stands once in ``file``, becomes ``new``; then each of ``tests`` (node ids) fails."""

    promise: str
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_full(self) -> bool:
        return not FULL.isdisjoint(name_of(test) for test in self.tests)


def all_breakages() -> list[Breakage]:
    """Those of every module of ``tests.breakages``, which has the name of its promise."""
    return [
        Breakage(module.name.replace("_", "-"), file, what, old, new, tuple(map(node_id, names)))
        for module in pkgutil.iter_modules(tests.breakages.__path__)
        for file, rows in importlib.import_module(f"tests.breakages.{module.name}").BREAKAGES.items()
        for what, old, new, *names in rows
    ]


def node_id(name: str) -> str:
    """Pytest's id of a test, whose name no other file of tests has, or of a whole file. Raises ``ValueError`` if it is not so."""
    if name.endswith(".py"):
        return name
    files = _files_of_tests()[re.split(r"::|\[", name)[0]]
    if len(files) != 1:
        raise ValueError(f"{name} is to stand in one file, not in {sorted(files)}")
    return f"{next(iter(files))}::{name}"


def name_of(test: str) -> str:
    """What a breakage calls it."""
    return test.partition("::")[2] or test


@cache
def _files_of_tests() -> defaultdict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:async def |def |class )?([Tt]est\w+)", path.read_text(), re.MULTILINE):
            found[name].add(str(path.relative_to(ROOT)))
    return found


def _make_copy(folder: Path) -> None:
    """The thread's own copy of the project: what is broken there is put back, and only that is compiled anew."""
    _OF_THREAD.copy = Path(tempfile.mkdtemp(dir=folder))
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, _OF_THREAD.copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, _OF_THREAD.copy / name)


def failing_before(chosen: Sequence[Breakage]) -> list[str]:
    """What pytest says of the tests that fail, or are not found, on a copy that is whole: they prove nothing."""
    said = []
    for is_full in (False, True):
        tests = {test for one in chosen if one.is_full is is_full for test in one.tests}
        status, last = _run(sorted(tests), is_full=is_full, at_once=AT_ONCE) if tests else (0, "")
        said += [f"exit status {status}: {last}"] if status else []
    return said


def blind(breakage: Breakage) -> list[str]:
    """Which of its tests do not fail on a copy with the breakage; all of them where it cannot be applied."""
    file, unmoved = _OF_THREAD.copy / breakage.file, []
    source = file.read_text()
    is_one = source.count(breakage.old) == 1
    file.write_text(source.replace(breakage.old, breakage.new))
    try:
        for test in breakage.tests:
            status, last = _run([test], is_full=breakage.is_full) if is_one else (0, "cannot be applied")
            print(f"exit status {status}: {breakage.file}: {breakage.what}: {last}", file=sys.stderr, flush=True)
            unmoved += [test] if status != 1 else []
    finally:
        file.write_text(source)
    if unmoved:
        print(f"NOT NOTICED by {unmoved}: {breakage.file}: {breakage.what}", file=sys.stderr, flush=True)
    return unmoved


def _run(tests: Sequence[str], *, is_full: bool, at_once: int = 0) -> tuple[int, str]:
    """Pytest's status (0 passed, 1 failed, and others that mean that nothing was tested), and what it says of failures."""
    copy = _OF_THREAD.copy
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}"]
    command += ["-n", str(at_once), "--dist", "worksteal"] if at_once else ["-x"]
    environment = os.environ | {"PYTHONPATH": str(copy)} | ({"BDN_FAULT": "full"} if is_full else {})
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200 if at_once else 600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "a hang"  # is noticed, too
    found = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    return done.returncode, "; ".join(line[:300] for line in found[:5])


def main() -> int:
    """Exit status 1 when a breakage was not noticed, or a test fails without any."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [one for one in all_breakages() if word in f"{one.promise} {one.file} {one.what} {one.tests}"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE, "", _make_copy, (Path(folder),)) as tries:
        if said := tries.submit(failing_before, chosen).result():
            print("some of the tests fail on what is not broken", *said, sep="\n", file=sys.stderr)
            return 1
        survivors = sum(map(bool, tries.map(blind, chosen)))
    PAGE.write_text(page())
    print(f"{len(chosen)} breakages, {survivors} not noticed")
    return 1 if survivors else 0


def page() -> str:
    """All breakages, by promise."""
    text, promise = HEADER, ""
    for one in all_breakages():
        if one.promise != promise:
            promise = one.promise
            text += f"\n## {promise}\n\n| breakage | caught by |\n|---|---|\n"
        text += f"| {one.what} | {', '.join(f'`{name_of(test)}`' for test in one.tests)} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
