"""Breaks a copy of ``bdn/core`` in many small ways and asks the tests of core to notice each of them.

``python -m tests.support.mutants [WORD]`` tries all, or those whose file or breakage holds WORD, prints what survived, and,
when it tried all, writes ``docs/mutants.md``. It never touches the working tree's package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.mutants_of_cache import CACHE
from tests.support.mutants_of_egress import EGRESS
from tests.support.mutants_of_limits import LIMITS
from tests.support.mutants_of_names import NAMES
from tests.support.mutants_of_pace import PACE
from tests.support.mutants_of_requests import REQUESTS
from tests.support.mutants_of_ring import RING
from tests.support.mutants_of_tiers import TIERS

MUTANTS = [*CACHE, *NAMES, *PACE, *REQUESTS, *EGRESS, *LIMITS, *RING, *TIERS]
EXAMPLES = "tests/unit/core"
LAWS = {
    "cache/index.py": "tests/property/test_cache_machine.py",
    "cache/chunk_index.py": "tests/property/test_chunk_index_machine.py",
    "cache/tier_budgets.py": "tests/property/test_tier_budget_laws.py",
    "cache/shortfall.py": "tests/property/test_cache_machine.py",
    "cache/ledger.py": "tests/property/test_ledger_machine.py",
    "cache/leases.py": "tests/property/test_lease_machine.py",
    "cache/recency.py": "tests/property/test_recency_machine.py",
    "source/patterns.py": "tests/property/test_pattern_laws.py",
    "source/uri.py": "tests/property/test_source_laws.py",
    "source/paths.py": "tests/property/test_path_laws.py",
    "source/weights.py": "tests/property/test_path_laws.py",
    "pace/limit.py": "tests/property/test_pace_laws.py",
    "pace/window.py": "tests/property/test_pace_laws.py",
    "pace/rate_limit.py": "tests/property/test_rate_limit_laws.py",
    "pace/token_bucket.py": "tests/property/test_rate_limit_laws.py",
    "ring/hedging.py": "tests/property/test_hedging_laws.py",
    "ring/lanes.py": "tests/property/test_lane_laws.py",
    "ring/peer_standing.py": "tests/property/test_peer_standing_machine.py",
    "ring/placement.py": "tests/property/test_placement_laws.py",
    "ring/routes.py": "tests/property/test_route_laws.py",
    "egress/rules.py": "tests/property/test_egress_laws.py",
    "egress/special_addresses.py": "tests/property/test_egress_laws.py",
    "egress/written_hosts.py": "tests/property/test_egress_laws.py",
}
HEADER = """# Breakages that the tests of core catch

Each row is one small change to a file of `bdn/core` that makes it wrong, and the first example and the first law (or state
machine) that fails because of it. Made by `python -m tests.support.mutants`, which applies every breakage to a copy.

| file | breakage | caught by |
|---|---|---|
"""


def first_failure(copy: Path, tests: str) -> str:
    """The name of the first failing test, or nothing when all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "breakage"}
    result = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*/(test_\w+)\.py(?:::(\w+))?", result.stdout, re.MULTILINE)
    return (found[2] or found[1]) if found else f"exit status {result.returncode}"


def copied(root: Path, folder: str) -> Path:
    """A copy of what the tests of core need."""
    copy = Path(folder)
    for part in ("bdn", "node_agent", "docs", "tests/support", "tests/property", EXAMPLES):
        shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", copy)
    return copy


def check_the_unbroken(root: Path, laws: set[str]) -> None:
    """A test that fails in any copy would count every breakage as caught."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(root, folder)
        if failing := [name for tests in (EXAMPLES, *sorted(laws)) if (name := first_failure(copy, tests))]:
            msg = f"fails without any breakage: {', '.join(failing)}"
            raise ValueError(msg)


def caught_by(root: Path, file: str, old: str, new: str) -> list[str]:
    """The first example and the first law that notice, if any do."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(root, folder)
        broken = copy / "bdn/core" / file
        source = broken.read_text()
        if source.count(old) != 1:
            msg = f"{file}: {old!r} stands there {source.count(old)} times; the list of mutants is stale"
            raise ValueError(msg)
        broken.write_text(source.replace(old, new))
        return [name for name in (first_failure(copy, EXAMPLES), first_failure(copy, laws_of(file))) if name]


def laws_of(file: str) -> str:
    """The laws of one file of core."""
    return LAWS.get(file, "tests/property/test_content_laws.py")


def main() -> int:
    """Exit status 1 when a breakage was not noticed."""
    root = Path(__file__).parents[2]
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    rows, survivors = [], 0
    chosen = [mutant for mutant in MUTANTS if word in f"{mutant[0]} {mutant[1]}"]
    check_the_unbroken(root, {laws_of(file) for file, *_ in chosen})
    for file, breakage, old, new in chosen:
        caught = caught_by(root, file, old, new)
        survivors += not caught
        rows.append(f"| `{file}` | {breakage} | {', '.join(f'`{name}`' for name in caught) or '**nothing**'} |")
        print(rows[-1], flush=True)
    if not word:
        (root / "docs/mutants.md").write_text(HEADER + "\n".join(rows) + "\n")
    print(f"{len(rows)} breakages, {survivors} not caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
