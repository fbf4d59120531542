"""``/mirror``: ask for sources, watch them arrive."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from bdn.core.errors import InvalidRequestError
from bdn.mirror.api.callers import Controller
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.net.api_server.event_stream import EVENTS, EventStream
from bdn.wire.http_fields import LONGEST_SOURCE
from bdn.wire.mirror_schema import TERMINAL, Mirror, MirrorPage, MirrorStatus, Plan
from bdn.wire.weights_schema import MirrorRequestBody

MirrorId = Annotated[str, Path(pattern=r"^mir_[0-9a-f]{24}$")]
WaitSeconds = Annotated[float, Query(ge=0, le=60, description="Answer early on a terminal state, at the latest then")]

_EVENT_SECONDS = 0.9  # one event at least every second


def build_mirrors_router(requests: MirrorRequests) -> APIRouter:
    """The routes for any such service."""
    router = APIRouter(prefix="/mirror", tags=["mirror"])

    @router.post("", status_code=202, response_model=Mirror | Plan, summary="Mirror sources, or plan it with dry_run")
    async def post(
        body: MirrorRequestBody, response: Response, caller: Controller, dry_run: Annotated[bool, Query()] = False
    ) -> Mirror | Plan:
        sources = body.sources()
        if dry_run:
            response.status_code = 200
            return await requests.plan(sources, caller.organisation)
        return await requests.request(sources, caller.organisation)

    @router.get("", summary="Mirrors, newest first")
    async def page(
        caller: Controller,
        status: MirrorStatus | None = None,
        source: Annotated[str | None, Query(max_length=LONGEST_SOURCE)] = None,
        cursor: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> MirrorPage:
        items, before = await requests.page(caller.organisation, status, source, _read_cursor(cursor), limit)
        return MirrorPage(items=items, next_cursor=before and _write_cursor(*before))

    @router.get("/{mirror_id}", summary="A mirror")
    async def get(mirror_id: MirrorId, caller: Controller, wait: WaitSeconds = 0) -> Mirror:
        return await requests.wait(mirror_id, caller.organisation, wait)

    @router.get(
        "/{mirror_id}/events",
        status_code=200,
        response_class=EventStream,
        responses=EVENTS,
        summary="Progress as server-sent events",
    )
    async def events(mirror_id: MirrorId, caller: Controller) -> EventStream:
        await requests.get(mirror_id, caller.organisation)  # a refusal has to come before the stream has begun
        followed = requests.follow(mirror_id, caller.organisation, _EVENT_SECONDS)
        return EventStream(followed, lambda mirror: mirror.status in TERMINAL)

    @router.post("/{mirror_id}/cancel", summary="Stop a mirror; a terminal state stays")
    async def cancel(mirror_id: MirrorId, caller: Controller) -> Mirror:
        return await requests.cancel(mirror_id, caller.organisation)

    return router


def _write_cursor(created_at: float, mirror_id: str) -> str:
    return base64.urlsafe_b64encode(f"{created_at!r} {mirror_id}".encode()).decode()


def _read_cursor(cursor: str | None) -> tuple[float, str] | None:
    if cursor is None:
        return None
    try:
        created_at, mirror_id = base64.urlsafe_b64decode(cursor.encode()).decode().split(" ")
        return float(created_at), mirror_id
    except (ValueError, binascii.Error):
        raise InvalidRequestError("cursor is not one of ours; leave it away for the first page") from None
