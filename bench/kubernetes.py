"""Volumes of pods in a real cluster of two nodes: how long the kubelet waits for ``bdn-csi``. The journeys of ``make kubernetes``, with their figures."""

import statistics
from collections.abc import Sequence

from bench.report import Figure, Missing, Row
from tests.kubernetes.journeys import CROWDS, JOURNEYS, SLOW_SECONDS
from tests.kubernetes.report import run_cluster, why_no_cluster

_ASKED = "<= 0.2"


def measure() -> list[Row]:
    if reason := why_no_cluster():
        return [Missing("kubernetes", reason, _ASKED)]
    report = run_cluster()
    failed = [one.__name__ for one in JOURNEYS if "error" in report.get(one.__name__, {"error": ""})]
    assert not failed, f"journeys that failed: {failed}"
    shared, slow = report["shared"], report["slow"]
    rows: list[Row] = [
        Figure(
            "second pod on a node: publish",
            "s",
            [shared["second"]["publish_seconds"]],
            _ASKED,
        )
    ]
    for count in CROWDS:
        crowd = report["crowd"][str(count)]
        what = f"{count} pods at once on two nodes" if count > 1 else "1 pod"
        rows.append(Figure(f"{what}: publish", "s", crowd["publish_seconds"]))
        if count > 1:
            rows.append(Figure(f"{what}: publish, p99", "s", [_p99(crowd["publish_seconds"])]))
        rows.append(Figure(f"{what}: until all run", "s", [crowd["seconds"]]))
    minutes = f"a volume whose source takes {SLOW_SECONDS:.0f} s"
    return [
        *rows,
        Figure(f"{minutes}: Running after its last byte", "s", [slow["after_last_byte_seconds"]], "<= 5"),
        Figure(f"{minutes}: publish calls", "calls", [len(slow["calls"])], "<= 4"),
        Figure(f"{minutes}: read from the upstream, of its size", "x", [slow["fetched"]], "<= 1"),
        Figure("second node: read from the mirror by both, of the model's size", "x", [shared["served"]], "<= 1.05"),
        Figure("a node that lost its power: until its pod runs again", "s", [report["rebooted"]["back"]["seconds"]]),
    ]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
