"""What we promise, which tests prove it, and how much they tried: the table that ``make fault`` prints.

A test of a promise is marked ``@pytest.mark.promise("space")``. It is one scenario, unless it counts what it did in the fixture
``tally``. It runs small in ``make test`` and large in ``make fault`` (``BDN_FAULT=full``): what differs, it asks ``at_scale``.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

PROMISES: Final = {
    "whole-files": "A path visible in a mount is a complete, verified file of exactly one manifest, whatever crashes or fails",
    "commit-order": "The index is never ahead of the data: a kill at any step is gone on from",
    "power-loss": "After a power loss a cache is what it was after some earlier step; what was not synced is fetched again",
    "leases": "What a stage leases is never evicted by age or by an ordinary eviction; force names the holders it breaks",
    "space": "Committed and reserved bytes stay within the budget; a full or broken disk fails stages, not the agent",
    "corruption": "A wrong byte from any tier is found before it is published, or by the scrub; from a store or a node only its chunk comes again",
    "access": "A digest alone grants nothing: not yours and not there are the same answer",
    "upgrades": "An upgrade keeps what the database, the store and the caches hold, or refuses before it touches anything",
    "collection": "What a manifest names is never collected; what was evicted from the mirror can be restored for seven days",
    "network": "A network that resets, stalls, trickles, repeats or parts costs time, never truth; the cluster serves without the mirror",
    "load": "A thousand askers at once cost one read of the upstream, and nothing leaks",
    "hostile-input": "No input makes a service answer 500, hang, or touch a path outside its root",
}
COLUMNS: Final = ("scenarios", "faults", "kills", "restarts", "wrong", "lost", "repaired", "refused")
FULL: Final = os.environ.get("BDN_FAULT") == "full"
_PROPERTY: Final = "promise tally"
_ALL: Final = "all"
_ROWS: Final = (*PROMISES, _ALL)


@dataclass
class Tally:
    """What one test tried and saw. ``wrong`` bytes, files or answers and ``lost`` ones fail the test.

    ``kills`` are of processes, with SIGKILL; ``restarts`` of code that ends in this process, between two of its steps.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, **counts: int) -> None:
        """Count; the names are those of ``COLUMNS``."""
        assert set(counts) <= set(COLUMNS), counts
        self.counts.update(counts)


def at_scale(subset: int, full: int) -> int:
    """How much to try: ``subset`` in ``make test``, ``full`` in ``make fault``."""
    return full if FULL else subset


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    assert list(request.node.iter_markers("promise")), "a test that counts says which promise it is about"
    counted = Tally()
    yield counted
    request.node.user_properties.append((_PROPERTY, dict(counted.counts)))
    assert not counted.counts["wrong"], f"{counted.counts['wrong']} wrong"
    assert not counted.counts["lost"], f"{counted.counts['lost']} lost"
    assert counted.counts["scenarios"], "nothing was tried"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(name): proves a promise of docs/promises.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("promise"):
            assert mark.args, f"{item.nodeid}: which promise?"
            assert set(mark.args) <= set(PROMISES), f"{item.nodeid}: no such promise: {mark.args}"
        item.user_properties.extend(("promise", name) for mark in item.iter_markers("promise") for name in mark.args)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table: one row a promise, where a test of two counts for both, and one of all tests, where it counts once."""
    tests: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = {name: Counter() for name in _ROWS}
    reports = [one for several in terminalreporter.stats.values() for one in several if hasattr(one, "when")]
    ran = {report.nodeid for report in reports if report.when == "call" and not report.skipped}
    for report in reports:
        given = list(getattr(report, "user_properties", ()))
        names = {value for key, value in given if key == "promise"}
        names |= {_ALL} if names else set()
        if report.when == "call" and not isinstance(report, pytest.SubtestReport):
            tests.update(names)
        if report.failed:
            failed.update(names)
        if report.skipped:
            skipped.update(names)
        if report.when == "teardown" and report.nodeid in ran:
            for name in names:
                counts[name].update(dict(given).get(_PROPERTY, {"scenarios": 1}))
    if not tests:
        return
    terminalreporter.section("what we promise, and what was tried against it")
    width = max(map(len, PROMISES))
    heads = ("tests", "failed", "skipped", *COLUMNS)
    terminalreporter.write_line("  ".join([f"{'promise':<{width}}", *(f"{head:>9}" for head in heads)]))
    for name in filter((tests | skipped).__contains__, _ROWS):
        figures = [tests[name], failed[name], skipped[name], *(counts[name][column] for column in COLUMNS)]
        terminalreporter.write_line("  ".join([f"{name:<{width}}", *(f"{figure:>9,}" for figure in figures)]))
