"""docs/simulation.md and its plot."""

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Protocol

from tests.benchmarks.scale import SCALE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """# A thousand nodes, simulated

Made by `python -m tests.benchmarks simulation`: the agent's own rules on modelled links. What was measured on a network is in
[benchmarks.md](benchmarks.md#ring).

![Completion and bytes from the mirror by number of nodes](simulation.svg)

## By number of nodes

16,690 chunks of 8 MiB (140 GB); all nodes start at the same moment with empty caches; each node and the mirror have a link of 10 Gbit/s.
*Completion* is when the last node is done, in times that one node alone needs (112 s).

{scales}

## With faults

128 chunks (1 GiB), links of 50 MB/s, exact shares. Completion is that of all members that are neither killed nor slowed; at most
2.5 is asked for. The slow member needs 20 times as long for its own stage in any case. What it owns is read twice from the mirror: by itself, and by
the next owners.

{faults}

## The model

- The rules are the real ones, imported from the agent: owners, order of requests, how much is read from the mirror at once, routes, deadlines,
  hedge budget and health of peers. The simulator (`tests/support/simulation`) carries out and counts.
- Every node has an uplink and a downlink of the same rate, the mirror an uplink; the network between them is not the limit. A
  request takes 0.5 ms.
- **By number of nodes**, a node's uplink serves chunk after chunk, first come first served; the mirror's uplink is shared fairly. That costs one
  event per chunk and is right for equal links only.
- **With faults**, all flows share all links max-min fairly at every moment, as TCP would with equal round trips. Where both models can be used they
  agree within 15 %, which a test holds.
- An owner that is asked for a chunk that it does not hold reads it from the mirror, within the bounds that the agent has. A killed member's connections
  are reset; from then on a request to it fails after 2 s.

## What it leaves out

CPU, disks and memory; packet loss and round trips; oversubscribed switches, so a thousand nodes in racks will do worse; members that know different
members; the heartbeat that takes a dead member out of the ring; small files and other stages.
"""
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 400, 70, 50


class Outcome(Protocol):
    """One simulated stage."""

    @property
    def title(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def origin_ratio(self) -> float: ...
    @property
    def completion(self) -> float: ...
    @property
    def hedged_share(self) -> float: ...


def write_page(scales: Sequence[Outcome], faults: Sequence[Outcome]) -> None:
    """The page with both tables, and the plot of ``scales``; at the full scale only, as benchmarks.md."""
    if SCALE != 1:
        return
    (DOCS / "simulation.svg").write_text(_plot(scales))
    (DOCS / "simulation.md").write_text(PAGE.format(scales=_table(scales), faults=_table(faults)))


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
