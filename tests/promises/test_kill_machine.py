"""The state machine of a node's cache, killed at any call to the disk and opened again, ten thousand times on one directory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.promises.tally import Scale, Tally

PROCESSES = 2


@pytest.mark.promise("commit-order", "leases", "space", "whole-files")
def test_ten_thousand_kills_lose_nothing_that_was_acknowledged_and_show_nothing_that_is_wrong(
    scale: Scale, tally: Tally
) -> None:
    cycles = scale.of(200, 10_000) // PROCESSES
    command = [sys.executable, "-m", "tests.support.crash.cache_kills"]
    running = [
        subprocess.Popen(
            [*command, str(seed), str(cycles)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for seed in range(1, 1 + PROCESSES)
    ]
    try:
        outcomes: list[dict[str, Any]] = [json.loads(process.communicate(timeout=1100)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    for outcome in outcomes:
        counts = outcome["counts"]
        tally.add(
            **{name: counts.get(name, 0) for name in ("scenarios", "faults", "refused")}, restarts=counts["kills"]
        )
        lost = sum("is lost" in fault for fault in outcome["faults"])
        tally.add(lost=lost, wrong=len(outcome["faults"]) - lost)
        assert not outcome["faults"], f"seed {outcome['seed']}, cycle {outcome['cycles']}: {outcome['faults']}"
        assert outcome["cycles"] == cycles
        assert counts["ready"] > cycles / 10, "hardly anything was staged"
