"""``python -m tests.mutation FILE [--count N] [--seed S] [--seconds N]``: changes FILE at random, and says which changes no test notices.

In a copy: the working tree is never changed. First the tests that are nearest to the file, by who imports whom, are run for a third of
the time, to learn which of its lines each one runs. Then each change is met by the tests that run its line, the quickest first.
The same seed makes the same changes; how many of them are tried, and against how many tests, is a matter of time.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from tests.mutation.mutations import Mutation, chosen, mutations_of

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("bdn", "node_agent", "migrations", "tests", "bench")
FAR: Final = ("tests/architecture", "tests/fuzz", "tests/mutation")  # they say nothing of behaviour
MOST_FILES: Final = 40  # of tests: those that are further away would only cost their imports
MEETING_SECONDS: Final = 10.0  # of tests that meet a change, the quickest first
LONGEST_SECONDS: Final = 120.0  # for one change: one that hangs is noticed


def nearest(file: Path, root: Path) -> list[str]:
    """Test files from which imports lead to this one, those with the fewest steps first."""
    importers: dict[Path, set[Path]] = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            for imported in _imports(path, root):
                importers.setdefault(imported, set()).add(path)
    steps, waiting = {file: 0}, deque([file])
    while waiting:
        here = waiting.popleft()
        for path in importers.get(here, ()):
            if path not in steps:
                steps[path] = steps[here] + 1
                waiting.append(path)
    tests = [path for path in steps if path.name.startswith("test_") and path.is_relative_to(root / "tests")]
    names = {str(path.relative_to(root)): (steps[path], path.stat().st_size) for path in tests}
    return sorted((name for name in names if not name.startswith(FAR)), key=lambda name: (*names[name], name))


def _imports(path: Path, root: Path) -> set[Path]:
    """Files of ours that it imports, also as plugins, and the packages' commands that are named by their module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("tests.", "bdn."))
        ):
            names |= {node.value, node.value.partition(":")[0]}
    found = {root / f"{name.replace('.', '/')}.py" for name in names if name.partition(".")[0] in PACKAGES}
    return {one for one in found if one != path and len(one.name) < 200 and one.exists()}


@dataclass(frozen=True)
class Copy:
    """A copy of the tree, in which ``file`` is changed."""

    root: Path
    file: str

    @property
    def said(self) -> Path:
        return self.root.parent / "said"

    def pytest(self, tests: list[str], *options: str, seconds: float, **environment: str) -> int:
        """The exit status; 1 when it takes longer. What it said is in ``said``."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--basetemp={self.root.parent / 'files'}", *options, *tests]
        with self.said.open("wb") as said:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return 1
        finally:
            with_its_children(process)

    def lines(self, tests: list[str], seconds: float) -> dict[str, tuple[float, list[int]]]:
        """Seconds and lines of the file by test, of those that could be run in this time and passed."""
        out = self.root.parent / "lines.json"
        environment = {
            "BDN_MUTATED": str(self.root / self.file),
            "BDN_LINES": str(out),
            "BDN_LINES_SECONDS": str(seconds),
        }
        self.pytest(tests, "-p", "tests.mutation.lines", seconds=seconds + LONGEST_SECONDS, **environment)
        return json.loads(out.read_text()) if out.exists() else {}

    def is_noticed(self, mutation: Mutation, source: str, tests: list[str]) -> bool:
        """Whether a test fails, or does not end, with this change."""
        (self.root / self.file).write_text(mutation.of(source))
        try:
            return self.pytest(tests, "-x", seconds=LONGEST_SECONDS) != 0
        finally:
            (self.root / self.file).write_text(source)


def with_its_children(process: subprocess.Popen[bytes]) -> None:
    """End what a run has started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def copied(root: Path, to: Path) -> None:
    """The files of the tree that git knows or would know."""
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root).decode()
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    for environment in root.glob(".venv*"):
        (to / environment.name).symlink_to(environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("file", help="a file of the product, such as node_agent/trust.py")
    parser.add_argument("--count", type=int, default=40, help="changes to try")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    parser.add_argument("--tests", nargs="*", default=[], help="these files, instead of those that are nearest")
    given = parser.parse_args()
    file = str(Path(given.file).resolve().relative_to(ROOT))
    source, until = (ROOT / file).read_text(), time.monotonic() + given.seconds
    every = mutations_of(source)
    with tempfile.TemporaryDirectory(prefix="bdn-mutation-") as folder:
        copy = Copy(Path(folder) / "tree", file)
        copied(ROOT, copy.root)
        tests = copy.lines(given.tests or nearest(ROOT / file, ROOT)[:MOST_FILES], given.seconds / 3)
        if not tests:
            sys.exit(f"no test could be run:\n{copy.said.read_text()[-3000:]}")
        lines = {line for _, seen in tests.values() for line in seen}
        print(
            f"{file}: {len(every)} changes are possible; {len(tests)} tests looked at, which run {len(lines)} lines",
            flush=True,
        )
        outcomes = {"noticed": 0, "survived": 0, "run by no test": 0}
        for mutation in chosen(every, given.count, given.seed):
            if time.monotonic() > until:
                break
            running = sorted((seconds, name) for name, (seconds, seen) in tests.items() if mutation.line in seen)
            sums = accumulate(seconds for seconds, _ in running)
            those = [
                name
                for (_, name), sum_ in zip(running, sums, strict=True)
                if sum_ < MEETING_SECONDS or name == running[0][1]
            ]
            outcome = "run by no test"
            if those:
                outcome = "noticed" if copy.is_noticed(mutation, source, those) else "survived"
            outcomes[outcome] += 1
            if outcome != "noticed":
                print(f"  {outcome}, met {len(those)} of {len(running)} tests: {mutation.told(source)}", flush=True)
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))


if __name__ == "__main__":
    main()
