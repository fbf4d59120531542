"""The views of mirrors: all of them with what runs first, and one with its sources."""

import re
from collections.abc import Iterator
from typing import Final, get_args

from bdn.core.errors import InvalidRequestError
from bdn.mirror.access.callers import Caller
from bdn.mirror.db.database import Cursor
from bdn.mirror.page.mirror_view import listed_mirrors, mirror_view
from bdn.mirror.page.parts import Group, Part
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import Sources
from bdn.mirror.page.views import Asked, PageView, Show
from bdn.wire.mirror_schema import Mirror, MirrorStatus

_SYNCING: Final = 200
_NEWEST: Final = 50
_ON_A_PAGE: Final = 100
_CURSOR: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?):(mir_[0-9a-f]{24})")


async def _read_all(sources: Sources, caller: Caller, asked: Asked) -> Show:
    """Without a filter, every mirror at work and the newest others; otherwise a page of those that match."""
    if any(asked.values()):
        found, following = await _page(sources, caller, asked)
    else:
        found, following = await _current(sources, caller)
    views = listed_mirrors(found)

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("mirror_parts.html")
        running = [view for view in views if view.is_running]
        yield Part(macros.list_heading(asked, get_args(MirrorStatus)))
        for name, some in (("running", running), ("ended", [view for view in views if not view.is_running])):
            cards = [Part(macros.card(view, caller.team is None)) for view in some]
            yield Part(macros.list_title(name, len(some)))
            yield Group(f'<ul id="{name}" class="cards">', cards, "</ul>")
        yield Part(macros.list_pager(asked, following))

    return show


async def _current(sources: Sources, caller: Caller) -> tuple[list[Mirror], str | None]:
    found: dict[str, Mirror] = {}
    before: Cursor | None = None
    for status, limit in (("SYNCING", _SYNCING), ("PENDING", _ON_A_PAGE), (None, _NEWEST)):
        some, before = await sources.requests.page(caller.organisation, status, None, None, limit, team=caller.team)
        found |= {mirror.id: mirror for mirror in some}
    return list(found.values()), _written(before)


async def _page(sources: Sources, caller: Caller, asked: Asked) -> tuple[list[Mirror], str | None]:
    status = asked["status"] or None
    if status is not None and status not in get_args(MirrorStatus):
        raise InvalidRequestError("no mirror has this status: choose one of the list")
    found, before = await sources.requests.page(
        caller.organisation,
        status,
        asked["source"] or None,
        _read_cursor(asked["before"]),
        _ON_A_PAGE,
        team=caller.team,
    )
    return found, _written(before)


def _written(cursor: Cursor | None) -> str | None:
    return None if cursor is None else f"{cursor[0]!r}:{cursor[1]}"


def _read_cursor(text: str) -> Cursor | None:
    if not text:
        return None
    if (found := _CURSOR.fullmatch(text)) is None:
        raise InvalidRequestError("this address is not one of the page: begin with the first mirrors")
    return float(found[1]), found[2]


async def _read_one(sources: Sources, caller: Caller, asked: Asked) -> Show:
    view = mirror_view(await sources.requests.get(asked["id"], caller.organisation, caller.team))

    def show(templates: Templates) -> Iterator[Part | Group]:
        macros = templates.macros("mirror_parts.html")
        yield Part(macros.heading(view))
        lines = [
            Part(macros.source(view, number, line, caller.team is None)) for number, line in enumerate(view.sources)
        ]
        yield Part(macros.sources_title(view))
        yield Group('<ul id="sources" class="cards">', lines, "</ul>")

    return show


MIRRORS: Final = PageView("mirrors", "Mirrors", "view.html", _read_all, ("status", "source", "before"))
MIRROR: Final = PageView("mirror", "Mirror", "view.html", _read_one, ("id",), is_in_menu=False)
