"""The entry of the operator's page, an application beside the API."""

import asyncio
import math
from functools import cached_property

from starlette.types import ASGIApp, Receive, Scope, Send

from bdn.mirror.db.waiting import SharedRead
from bdn.mirror.page.sources import Sources

PAGE = "/ui"


class OperatorPage:
    """Loads templates and routes with the first request: a mirror that is embedded in a pull has none."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    @cached_property
    def _app(self) -> SharedRead[ASGIApp]:
        return SharedRead(self._load, math.inf)

    async def _load(self) -> ASGIApp:
        return await asyncio.to_thread(self._build)

    def _build(self) -> ASGIApp:
        from bdn.mirror.page.app import new_page  # noqa: PLC0415 - 50 ms

        return new_page(self._sources)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = await self._app.get()
        await app(scope, receive, send)
