"""The views of an eviction and of a prefetch, by their ids: plan, progress, result."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bdn.core.units import format_size
from bdn.mirror.access.callers import Caller
from bdn.mirror.api import routes as api
from bdn.mirror.page.eviction_view import EvictionView, eviction_view
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.remedies import Problem, problem_of
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.access_schema import Role
from bdn.wire.operation_schema import Eviction, PrefetchNode

_RANK: Final = {"FAILED": 0, "UNREACHABLE": 1, "RUNNING": 2, "PENDING": 3, "READY": 4}
_NODES_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class OperationLine:
    cluster: str
    node: str
    state: str
    percent: int | None
    bytes: str
    problem: Problem | None


async def read_eviction(sources: Sources, caller: Caller, eviction_id: str) -> tuple[Eviction, EvictionView]:
    """Raises ``NotFoundError`` for another organisation's, and ``NotPermittedError`` for a team."""
    caller = caller.of_all_teams()
    eviction = await api.eviction(sources.operations, eviction_id, caller)
    held = await sources.names.held_of(caller.organisation, {item.manifest for item in eviction.items})
    return eviction, eviction_view(eviction, held, sources.now())


async def _read_eviction(sources: Sources, caller: Caller, asked: Asked) -> Show:
    eviction, view = await read_eviction(sources, caller, asked["id"])
    is_operator = caller.role is Role.OPERATOR
    of = eviction.request.manifest or eviction.request.source or ""

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("operation_parts.html")
        yield Part(macros.eviction_heading(view, of))
        yield Part(macros.holders(view, is_operator))
        yield Part(macros.confirm(view) if view.is_plan else macros.undo(view))
        lines = [Part(macros.item(number, line, is_operator), "table") for number, line in enumerate(view.items)]
        yield Group(macros.items_head(is_operator), lines, "</tbody></table></div>")
        yield Part(macros.items_more(view))

    return show


async def _read_prefetch(sources: Sources, caller: Caller, asked: Asked) -> Show:
    found = await api.prefetched(sources.operations, asked["id"], caller.of_all_teams())
    lines = sorted(map(_node, found.nodes), key=lambda line: (_RANK[line.state], line.percent or 0, line.node))

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("operation_parts.html")
        yield Part(macros.prefetch_heading(found, sum(line.state == "READY" for line in lines), len(lines)))
        rows = [Part(macros.node(number, line), "table") for number, line in enumerate(lines[:_NODES_SHOWN])]
        yield Group(macros.nodes_head(), rows, "</tbody></table></div>")
        yield Part(macros.nodes_more(max(0, len(lines) - _NODES_SHOWN)))

    return show


def _node(node: PrefetchNode) -> OperationLine:
    done, total = node.bytes_from.total, node.bytes_total
    percent = 100 if node.state == "READY" else None if not total else min(99, 100 * done // total)
    size = format_size(done) if total is None else f"{format_size(done)} of {format_size(total)}"
    return OperationLine(node.cluster, node.node, node.state, percent, size, problem_of(node.error))


EVICTION: Final = PageView("eviction", "Eviction", "view.html", _read_eviction, ("id",), is_in_menu=False)
PREFETCH: Final = PageView("prefetch", "Prefetch", "view.html", _read_prefetch, ("id",), is_in_menu=False)
