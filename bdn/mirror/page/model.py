"""The view of a model, by source, digest or path: its places, holders and reasons; evict and prefetch from here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.chunk import digest_in
from bdn.mirror.access.callers import Caller
from bdn.mirror.db.events import Wanted
from bdn.mirror.page.model_paths import PathMatch, models_at
from bdn.mirror.page.model_view import ModelView, model_view
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.access_schema import Role
from bdn.wire.event_schema import EventDocument, Named
from bdn.wire.mirror_schema import HeldManifest, HeldManifests

_EVENTS: Final = 1000  # newest ones that explain the places
_SHOWN: Final = 5  # manifests of a source in full; a source may have hundreds of revisions
_LISTED: Final = 100


@dataclass(frozen=True, slots=True)
class _Found:
    """``is_cut``: there are older events than those that were read."""

    named: Named | None
    models: Sequence[ModelView]
    others: Sequence[HeldManifest]
    is_cut: bool
    clusters: Sequence[str]


async def _read(sources: Sources, caller: Caller, asked: Asked) -> Show:
    """Raises ``NotPermittedError`` for a team, as ``GET /names``, ``/manifests`` and ``/events`` do."""
    caller = caller.of_all_teams()
    of = asked["of"].strip()
    if not of:
        return await _read_list(sources, caller, asked)
    if of.startswith("/"):
        return _at_path(of, await models_at(of, sources, caller))
    found = await _found(sources, caller, of, asked["node"].strip())
    is_operator = caller.role is Role.OPERATOR

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("model_parts.html")
        yield Part(macros.heading(of, found.named, len(found.models) + len(found.others)))
        yield Part(macros.ask_node(of, asked["node"]))
        for number, one in enumerate(found.models):
            yield Part(macros.model(number, one, is_operator))
            yield Part(macros.actions(number, one, is_operator, found.clusters))
            yield Part(macros.places(number, one, is_operator, found.is_cut))
        if found.others:
            yield Part(macros.others(found.others[:_LISTED], len(found.others)))

    return show


async def _found(sources: Sources, caller: Caller, of: str, node: str) -> _Found:
    named = await sources.names.find(of, caller.organisation)
    held = await sources.names.held_of(caller.organisation, named.manifests)
    if caller.role is not Role.OPERATOR:
        held = {one.manifest: one for one in HeldManifests(items=list(held.values())).without_holders().items}
    ordered = sorted(named.manifests, key=lambda one: _order(held.get(one)))
    shown, others = ordered[:_SHOWN], ordered[_SHOWN:]
    events, is_cut = await _events(sources, caller, shown, node)
    models = [model_view(one, named.manifests[one], held.get(one), events, node or None) for one in shown]
    clusters = sorted({agent.cluster for agent in await sources.agents.get()})
    return _Found(named, models, [held[one] for one in others if one in held], is_cut, clusters)


def _order(held: HeldManifest | None) -> tuple[bool, int]:
    """What the mirror has first, then what most nodes have."""
    return not (held and held.mirror), -len(held.nodes) if held else 0


async def _events(
    sources: Sources, caller: Caller, manifests: Sequence[str], node: str
) -> tuple[list[EventDocument], bool]:
    name = node.rpartition("/")[2] or None
    wanted = Wanted([digest_in(one).hex for one in manifests], None, name)
    found, older = await sources.events.page(caller.organisation, wanted, None, _EVENTS)
    return found, older is not None


async def _read_list(sources: Sources, caller: Caller, asked: Asked) -> Show:
    after = digest_in(asked["after"]).hex if asked["after"] else ""
    held = await sources.names.held(caller.organisation, after, _LISTED)

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("model_parts.html")
        yield Part(macros.list_heading())
        rows = [Part(macros.list_row(one)) for one in held.items]
        yield Group('<ul id="models" class="cards">', rows, "</ul>")
        yield Part(macros.list_pager(held.next_cursor, after))

    return show


def _at_path(path: str, found: Sequence[PathMatch]) -> Show:
    def show(templates: Templates) -> Iterator[Part | Group]:
        yield Part(templates.macros("model_parts.html").at_path(path, found))

    return show


MODEL: Final = PageView("model", "Models", "view.html", _read, ("of", "node", "after"), is_for_teams=False)
