"""``/events`` and ``/names``: what was decided about a manifest, and what a digest or a source stands for."""

from typing import Annotated, Final

from fastapi import Depends, Query

from bdn.core.chunk import Digest
from bdn.core.errors import InvalidRequestError
from bdn.mirror.api.parameters import Controller, read_cursor, write_cursor
from bdn.mirror.db.events import Events, Wanted
from bdn.mirror.operations.names import Names
from bdn.net.api_server import new_router, provided
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventDocument, Named
from bdn.wire.shapes import Page

_TEXT: Final = r"^[^\x00]*$"
_Name = Annotated[str | None, Query(max_length=256, pattern=_TEXT)]
_Limit = Annotated[int, Query(ge=1, le=1000)]
_Events = Annotated[Events, provided(Events)]
_Names = Annotated[Names, provided(Names)]

router = new_router("events")


def _wanted(
    manifest: Annotated[list[str] | None, Query(max_length=MANIFESTS_AT_ONCE)] = None,
    digest: Annotated[str | None, Query(description="Of a content or a chunk")] = None,
    node: _Name = None,
) -> Wanted:
    manifests = [_hex(one) for one in manifest] if manifest else None
    return Wanted(manifests, digest and _hex(digest), node)


@router.get("/events", summary="What was decided, newest first")
async def page(
    events: _Events,
    caller: Controller,
    wanted: Annotated[Wanted, Depends(_wanted)],
    cursor: _Name = None,
    limit: _Limit = 100,
) -> Page[EventDocument]:
    items, before = await events.page(caller.organisation, wanted, read_cursor(cursor), limit)
    return Page[EventDocument](items=items, next_cursor=before and write_cursor(*before))


@router.get("/names", summary="What a digest or a source stands for")
async def find(
    names: _Names, caller: Controller, of: Annotated[str, Query(min_length=1, max_length=4096, pattern=_TEXT)]
) -> Named:
    return await names.find(of, caller.organisation)


def _hex(text: str) -> str:
    try:
        return Digest.parse(text).hex
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
