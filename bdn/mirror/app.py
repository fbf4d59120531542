"""The mirror put together: ``open_mirror`` reads like the picture in the README, from upstreams to agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI

from bdn.core.errors import InvalidRequestError
from bdn.core.pace.streaming import StallPolicy
from bdn.mirror.delivery import build_api, open_delivery
from bdn.mirror.ground import open_ground
from bdn.mirror.ingest.requests import MirrorRequests
from bdn.mirror.ingest.views import MirrorViews
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.upkeep import upkeep_of
from bdn.mirror.upstream.retries import Pause
from bdn.mirror.upstreams import open_upstreams
from bdn.mirror.watch import Watch
from bdn.mirror.work import open_work

_STALL: Final = StallPolicy()


@dataclass(frozen=True)
class MirrorService:
    """A running mirror: the worker works and the data plane serves; ``api`` is ready for an HTTP server."""

    api: FastAPI
    requests: MirrorRequests
    data_port: int | None
    watch: Watch


@asynccontextmanager
async def open_mirror(
    settings: MirrorSettings,
    *,
    serve: bool = True,
    work: bool = True,
    program: str = "bdn serve",
    pause: Pause = asyncio.sleep,
    clock: Callable[[], float] = time.time,
    stall: StallPolicy = _STALL,
) -> AsyncIterator[MirrorService]:
    """Everything the mirror is made of, until the block ends.

    ``pause`` waits before an upstream is asked again; ``clock`` tells when credentials and identity tokens end and agents are silent;
    ``stall`` when a body of an upstream comes too slowly.
    """
    check_binding(settings)
    async with AsyncExitStack() as stack:
        ground = await open_ground(stack, settings, program, clock)

        # upstream → store
        upstreams, upkeep = await open_upstreams(ground, pause), upkeep_of(ground)
        if work:
            await open_work(stack, ground, upstreams, upkeep, stall)

        # store → agents
        delivery = open_delivery(stack, ground, serve=serve)
        views = MirrorViews(ground.database, ground.signer, settings.grant_seconds)
        requests = MirrorRequests(ground.database, upstreams.planner(), views, ground.watch)
        api = build_api(ground, upstreams, upkeep, delivery, requests)
        yield MirrorService(api, requests, delivery.data_port, ground.watch)


def check_binding(settings: MirrorSettings) -> None:
    """Without authentication a service is for this machine alone."""
    if settings.auth == "token" and not settings.token:
        raise InvalidRequestError("BDN_AUTH=token needs BDN_TOKEN, the token that callers must send")
    if settings.auth == "off" and settings.host not in ("127.0.0.1", "::1", "localhost"):
        raise InvalidRequestError(f"BDN_HOST={settings.host} is not loopback; set BDN_AUTH=token and BDN_TOKEN first")
