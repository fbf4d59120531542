"""``/mirror``: ask for sources, watch them arrive."""

from typing import Annotated

from fastapi import Path, Query, Response

from bdn.mirror.api.parameters import Controller, WaitSeconds, read_cursor, write_cursor
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.net.api_server import EVENTS, EventStream, new_router, provided
from bdn.wire.http_fields import LONGEST_SOURCE
from bdn.wire.mirror_schema import TERMINAL, Mirror, MirrorRequestBody, MirrorStatus, Plan
from bdn.wire.shapes import Page

MirrorId = Annotated[str, Path(pattern=r"^mir_[0-9a-f]{24}$")]

_EVENT_SECONDS = 0.9  # one event at least every second
_Requests = Annotated[MirrorRequests, provided(MirrorRequests)]

router = new_router("mirror")


@router.post(
    "/mirror", status_code=202, response_model=Mirror | Plan, summary="Mirror sources, or plan it with dry_run"
)
async def post(
    requests: _Requests,
    body: MirrorRequestBody,
    response: Response,
    caller: Controller,
    dry_run: Annotated[bool, Query()] = False,
) -> Mirror | Plan:
    sources = body.sources()
    if dry_run:
        response.status_code = 200
        return await requests.plan(sources, caller.organisation)
    return await requests.request(sources, caller.organisation)


@router.get("/mirror", summary="Mirrors, newest first")
async def page(
    *,
    requests: _Requests,
    caller: Controller,
    status: MirrorStatus | None = None,
    source: Annotated[str | None, Query(max_length=LONGEST_SOURCE)] = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Page[Mirror]:
    items, before = await requests.page(caller.organisation, status, source, read_cursor(cursor), limit)
    return Page[Mirror](items=items, next_cursor=before and write_cursor(*before))


@router.get("/mirror/{mirror_id}", summary="A mirror")
async def get(requests: _Requests, mirror_id: MirrorId, caller: Controller, wait: WaitSeconds = 0) -> Mirror:
    return await requests.wait(mirror_id, caller.organisation, wait)


@router.get(
    "/mirror/{mirror_id}/events",
    status_code=200,
    response_class=EventStream,
    responses=EVENTS,
    summary="Progress as server-sent events",
)
async def events(requests: _Requests, mirror_id: MirrorId, caller: Controller) -> EventStream:
    await requests.get(mirror_id, caller.organisation)  # a refusal has to come before the stream has begun
    followed = requests.follow(mirror_id, caller.organisation, _EVENT_SECONDS)
    return EventStream(followed, lambda mirror: mirror.status in TERMINAL)


@router.post("/mirror/{mirror_id}/cancel", summary="Stop a mirror; a terminal state stays")
async def cancel(requests: _Requests, mirror_id: MirrorId, caller: Controller) -> Mirror:
    return await requests.cancel(mirror_id, caller.organisation)
