"""A thousand nodes, simulated with the real placement, lanes, routes, patience and standing; and smaller rings with faults."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

from bdn.core.chunk import CHUNK_SIZE
from tests.benchmarks.report import Figure, Row
from tests.benchmarks.scale import scaled
from tests.benchmarks.simulation_page import write_page
from tests.support.simulation.fluid import FluidLinks
from tests.support.simulation.links import Links, QueuedLinks
from tests.support.simulation.node import Case
from tests.support.simulation.ring import Ring

INTRODUCTION = """
Simulated, not measured: time is that of modelled links. Owners, order of requests, routes, deadlines, hedging and the health of peers are the agent's own
code. *Completion* is when the last node is done, in times that one node alone needs. The model, its limits and the plot: [simulation.md](simulation.md).
"""
CHUNKS = scaled(16_690)  # 140 GB
FEW_CHUNKS = 128  # 1 GiB
FAST, SLOW_LINK = 1.25e9, 50e6


@dataclass(frozen=True)
class Outcome:
    """What came out of one simulated stage of a whole cluster."""

    title: str
    nodes: int
    origin_ratio: float  # bytes from the mirror, of the unique bytes
    completion: float  # of the last node that is neither dead nor slow, in times of one node alone
    hedged_share: float  # the largest of any node's, of its stage's bytes


def measure() -> list[Row]:
    """By number of nodes, then with faults; writes docs/simulation.md and its plot."""
    scales = [_play(_named(nodes), Case(nodes, CHUNKS, FAST, FAST), QueuedLinks) for nodes in (1, 8, 20, 100, 1000)]
    faults = [_play(title, case, FluidLinks) for nodes in (8, 20) for title, case in _faults(nodes)]
    write_page(scales, faults)
    return [*_rows(scales, origin="<= 1.05", completion=""), *_rows(faults, origin="", completion="<= 2.5")]


def _named(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes:,} nodes"


def _faults(nodes: int) -> list[tuple[str, Case]]:
    def case(kills: dict[int, float] | None = None, slow: dict[int, float] | None = None) -> Case:
        return Case(nodes, FEW_CHUNKS, SLOW_LINK, SLOW_LINK, kills=kills or {}, slow=slow or {})

    half = case().alone_seconds / 2
    return [
        (f"{nodes} nodes, nothing happens", case()),
        (f"{nodes} nodes, one killed at half time", case(kills={1: half})),
        (f"{nodes} nodes, one at 1/20", case(slow={3: 20.0})),
        (f"{nodes} nodes, one killed and one at 1/20", case(kills={1: half}, slow={3: 20.0})),
    ]


def _play(title: str, case: Case, make_links: Callable[[float, list[float]], Links]) -> Outcome:
    gc.disable()  # millions of small objects, none of them in a circle
    try:
        ring = Ring(case, make_links)
        ring.run()
    finally:
        gc.enable()
    hedged = max(node.hedges.used for node in ring.survivors) / (case.chunks * CHUNK_SIZE)
    return Outcome(title, case.nodes, ring.origin_ratio, ring.last_ratio, hedged)


def _rows(outcomes: list[Outcome], *, origin: str, completion: str) -> list[Row]:
    return [
        row
        for one in outcomes
        for row in (
            Figure(f"{one.title}: bytes from the mirror", "x unique", (one.origin_ratio,), origin),
            Figure(f"{one.title}: completion", "x one alone", (one.completion,), completion),
        )
    ]
