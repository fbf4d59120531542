"""A thousand nodes, simulated with the real placement, lanes, routes, patience and standing; and smaller rings with faults."""

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from bdn.core.chunk import CHUNK_SIZE
from bench.report import SCALE, Figure, Row, scaled
from tests.support.simulation.links import FluidLinks, Links, QueuedLinks
from tests.support.simulation.ring import Case, Ring

CHUNKS = scaled(16_690)  # 140 GB
FEW_CHUNKS = 128  # 1 GiB
FAST, SLOW_LINK = 1.25e9, 50e6
DOCS = Path(__file__).parents[1] / "docs"
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 400, 70, 50


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


def write_page(scales: Sequence[Outcome], faults: Sequence[Outcome]) -> None:
    """Both tables of the page, and the plot of ``scales``; at the full scale only, as benchmarks.md."""
    if SCALE != 1:
        return
    (DOCS / "simulation.svg").write_text(_plot(scales))
    tables = iter((_table(scales), _table(faults)))
    page = DOCS / "simulation.md"
    page.write_text(re.sub(r"(?:^\|.*\n)+", lambda _: f"{next(tables)}\n", page.read_text(), flags=re.MULTILINE))


def _table(outcomes: Sequence[Outcome]) -> str:
    head = "| what | bytes from the mirror, x unique | completion, x one alone | most asked for twice, of a stage |\n|---|---|---|---|"
    rows = [
        f"| {one.title} | {one.origin_ratio:.3f} | {one.completion:.2f} | {100 * one.hedged_share:.1f} % |"
        for one in outcomes
    ]
    return "\n".join([head, *rows])


def _plot(outcomes: Sequence[Outcome]) -> str:
    nodes = [one.nodes for one in outcomes]
    lines = [
        ("#999999", "everybody reads from the mirror", [float(count) for count in nodes]),
        ("#1f77b4", "the last node is through, x one alone", [one.completion for one in outcomes]),
        ("#d62728", "bytes from the mirror, x unique", [one.origin_ratio for one in outcomes]),
    ]
    body = [_axes()]
    for place, (colour, title, values) in enumerate(lines):
        points = " ".join(f"{_x(count):.1f},{_y(value):.1f}" for count, value in zip(nodes, values, strict=True))
        body.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body.append(f'<text x="{LEFT + 15}" y="{30 + 18 * place}" fill="{colour}">{title}</text>')
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">'
    return "\n".join([start, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *body, "</svg>", ""])


def _axes() -> str:
    marks = []
    for mark in (1, 10, 100, 1000):
        marks.append(f'<text x="{_x(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{mark}</text>')
        marks.append(f'<text x="{LEFT - 8}" y="{_y(mark) + 4:.1f}" text-anchor="end">{mark}</text>')
        marks.append(f'<path d="M{LEFT} {_y(mark):.1f}H{WIDTH - 20}" stroke="#dddddd"/>')
    marks.append(f'<path d="M{LEFT} 10V{HEIGHT - BOTTOM}H{WIDTH - 20}" fill="none" stroke="black"/>')
    marks.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 10}" text-anchor="middle">nodes</text>')
    return "\n".join(marks)


def _x(nodes: float) -> float:
    return LEFT + log10(nodes) / 3 * (WIDTH - LEFT - 40)


def _y(ratio: float) -> float:
    """From 0.8, so that 1 does not lie on the axis, to 1,000."""
    return HEIGHT - BOTTOM - log10(ratio / 0.8) / log10(1000 / 0.8) * (HEIGHT - BOTTOM - 20)
