"""``/events`` and ``/names``: what was decided about a manifest, and what a digest or a source stands for."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query

from bdn.core.digest import Digest
from bdn.core.errors import InvalidRequestError
from bdn.mirror.api.callers import Controller
from bdn.mirror.db.events import Wanted
from bdn.mirror.events import Events
from bdn.mirror.operations.names import Names
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventPage, Named

_TEXT: Final = r"^[^\x00]*$"
_Name = Annotated[str | None, Query(max_length=256, pattern=_TEXT)]
_Limit = Annotated[int, Query(ge=1, le=1000)]


def _wanted(
    manifest: Annotated[list[str] | None, Query(max_length=MANIFESTS_AT_ONCE)] = None,
    digest: Annotated[str | None, Query(description="Of a content or a chunk")] = None,
    node: _Name = None,
) -> Wanted:
    manifests = [_hex(one) for one in manifest] if manifest else None
    return Wanted(manifests, digest and _hex(digest), node)


def build_events_router(events: Events, names: Names) -> APIRouter:
    """The routes for any such services."""
    router = APIRouter(tags=["events"])

    @router.get("/events", summary="What was decided, newest first")
    async def page(
        caller: Controller, wanted: Annotated[Wanted, Depends(_wanted)], cursor: _Name = None, limit: _Limit = 100
    ) -> EventPage:
        items, before = await events.page(caller.organisation, wanted, _read_cursor(cursor), limit)
        return EventPage(items=items, next_cursor=before and _write_cursor(*before))

    @router.get("/names", summary="What a digest or a source stands for")
    async def find(
        caller: Controller, of: Annotated[str, Query(min_length=1, max_length=4096, pattern=_TEXT)]
    ) -> Named:
        return await names.find(of, caller.organisation)

    return router


def _hex(text: str) -> str:
    try:
        return Digest.parse(text).hex
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def _write_cursor(at: float, event_id: str) -> str:
    return base64.urlsafe_b64encode(f"{at!r} {event_id}".encode()).decode()


def _read_cursor(cursor: str | None) -> tuple[float, str] | None:
    if cursor is None:
        return None
    try:
        at, event_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(" ")
        return float(at), event_id
    except (ValueError, binascii.Error):
        raise InvalidRequestError("cursor is not one of ours; leave it away for the first page") from None
