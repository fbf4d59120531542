"""The view *Cluster*: a heat map of all nodes by the use of their caches, and a table of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final

from bdn.core.errors import InvalidRequestError, NotFoundError
from bdn.mirror.access.callers import Caller
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.problems import NodeState
from bdn.mirror.page.rendering import Templates, path_of
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show

_ROWS: Final = 50  # of the table on one page
_MOST_CELLS: Final = 5000  # of the map; beyond it a cluster has to be chosen
_SIDE: Final = 12  # of a cell, with its gap
_RANK: Final = {"bad": 0, "warn": 1, "good": 2}


@dataclass(frozen=True)
class _Sum:
    name: str
    agents: int
    alive: int
    held: int
    budget: int


@dataclass(frozen=True)
class _ClusterFacts:
    sums: Sequence[_Sum]
    nodes: Sequence[NodeState]
    cluster: str
    page: int


async def _read(sources: Sources, caller: Caller, asked: Asked) -> Show:
    caller.of_all_teams()
    every = [NodeState.of(agent) for agent in await sources.agents.get()]
    cluster, page = asked["cluster"], asked["page"] or "1"
    if not page.isdecimal() or len(page) > 6:
        raise InvalidRequestError("page is a number from 1 on: correct the address")
    nodes = [node for node in every if cluster in ("", node.cluster)]
    if cluster and not nodes:
        raise NotFoundError(f"cluster {cluster[:200]}")
    return partial(_show, _ClusterFacts(list(_sums(every)), nodes, cluster, int(page)))


def _sums(nodes: Sequence[NodeState]) -> Iterator[_Sum]:
    by_cluster: dict[str, list[NodeState]] = {}
    for node in nodes:
        by_cluster.setdefault(node.cluster, []).append(node)
    for name, some in by_cluster.items():
        alive = [node for node in some if node.is_alive]
        held, budget = sum(node.held for node in alive), sum(node.budget for node in alive)
        yield _Sum(name, len(some), len(alive), held, budget)


def _show(facts: _ClusterFacts, templates: Templates) -> Iterator[Part | Group]:
    macros, drawing = templates.macros("cluster_parts.html"), templates.macros("drawing.html")
    pages = max(1, math.ceil(len(facts.nodes) / _ROWS))
    page = max(1, min(facts.page, pages))
    yield Part(macros.heading(facts.sums, facts.cluster))
    if not facts.nodes:
        return
    yield Part(macros.legend())
    shown = facts.nodes[:_MOST_CELLS]
    columns = max(10, math.ceil(math.sqrt(2 * len(shown))))
    cells = [
        Part(drawing.cell(_key("c", node), _place(node), *_at(index, columns), _shade(node), _said(node)), "svg")
        for index, node in enumerate(shown)
    ]
    yield Group(macros.map_head(columns, math.ceil(len(shown) / columns), len(shown)), cells, "</svg>")
    ranked = sorted(facts.nodes, key=lambda node: (_RANK[node.kind], -node.percent, node.cluster, node.name))
    first = (page - 1) * _ROWS
    rows = [Part(macros.row(_key("r", node), node), "table") for node in ranked[first : first + _ROWS]]
    head = macros.table_head(first + 1, first + len(rows), len(ranked))
    yield Group(head, rows, "</tbody></table></div>")
    yield Part(macros.pager(facts.cluster, page, pages))


def _key(kind: str, node: NodeState) -> str:
    name = f"{len(node.cluster)} {node.cluster} {node.name}".encode(errors="surrogatepass")
    return f"{kind}{blake2b(name, digest_size=6).hexdigest()}"


def _place(node: NodeState) -> str:
    return path_of("node", cluster=node.cluster, node=node.name)


def _at(index: int, columns: int) -> tuple[int, int]:
    return index % columns * _SIDE + 1, index // columns * _SIDE + 1


def _shade(node: NodeState) -> str:
    if not node.is_alive:
        return "left" if node.kind == "good" else "dead"
    shade = f"u{min(9, node.percent // 10)}"
    return shade if node.kind == "good" else f"{shade} pressed"


def _said(node: NodeState) -> str:
    return f"{node.name}: {node.state}, {node.percent} % used"


CLUSTER: Final = PageView("cluster", "Cluster", "cluster.html", _read, ("cluster", "page"), is_for_teams=False)
