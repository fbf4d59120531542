"""Live views: a view is read at most once a second for all viewers of a caller, and only while one of them looks."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Final

from fastapi.sse import format_sse_event

from bdn.core.errors import BdnError, UnauthenticatedError
from bdn.mirror.access.callers import Caller
from bdn.mirror.db.waiting import SharedRead, SharedReads
from bdn.mirror.page.parts import Part, Snapshot
from bdn.mirror.page.rendering import Templates
from bdn.mirror.page.sources import FRESH_SECONDS, Sources
from bdn.mirror.page.views import Asked, PageView

_MOST_VIEWERS: Final = 200  # of one organisation or team, in this process
_CHECKED_SECONDS: Final = 5.0  # between two checks of a viewer's session
_TOPIC: Final = "page"
_Key = tuple[str, Caller, tuple[tuple[str, str], ...]]


class Feeds:
    """Snapshots of views, by view, caller and query."""

    def __init__(self, sources: Sources, templates: Templates) -> None:
        self._sources = sources
        self._templates = templates
        self._macros = templates.macros("live.html")
        self._snapshots: SharedReads[_Key, Snapshot] = SharedReads(FRESH_SECONDS)
        self._viewers: Counter[Caller] = Counter()

    def of(self, view: PageView, caller: Caller, asked: Asked) -> SharedRead[Snapshot]:
        key = view.name, caller, tuple(asked.items())
        return self._snapshots.of(key, partial(self._read, view, caller, asked))

    async def _read(self, view: PageView, caller: Caller, asked: Asked) -> Snapshot:
        show = await view.read(self._sources, caller, asked)
        parts = await asyncio.to_thread(lambda: {part.id: part for part in show(self._templates)})
        return Snapshot(parts, Part(self._macros.as_of(self._sources.now())))

    async def stream(
        self, view: PageView, caller: Caller, asked: Asked, since: str, session_id: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield what changed, as events. A viewer that has the snapshot named ``since`` does not receive it again.

        Ends with the session, or when the service stops: the viewer then connects to another replica.
        """
        if self._viewers[caller] >= _MOST_VIEWERS:
            yield _event(self._macros.failed(f"{_MOST_VIEWERS} other pages are live: close some, and reload this one"))
            return
        self._viewers[caller] += 1
        try:
            async with aclosing(self._events(self.of(view, caller, asked), since, session_id)) as events:
                async for event in events:
                    yield event
        finally:
            self._viewers[caller] -= 1
            self._viewers += Counter()  # drops callers without viewers

    async def _events(self, read: SharedRead[Snapshot], since: str, session_id: str | None) -> AsyncGenerator[bytes]:
        watch = self._sources.watch
        topic, seen, checked_at = watch.topic(_TOPIC), None, time.monotonic()
        while not watch.stopping:
            try:
                if time.monotonic() - checked_at >= _CHECKED_SECONDS:
                    await self._sources.sessions.caller(session_id)
                    checked_at = time.monotonic()
                snapshot = await read.get()
                changed, seen = _update(seen, snapshot, since), snapshot
                if changed:
                    yield format_sse_event(data_str=changed, id=snapshot.name)
            except UnauthenticatedError:
                yield _event(self._macros.ended())
                return
            except BdnError as error:
                yield _event(self._macros.failed(error.message))
            await topic.changed(topic.changes, FRESH_SECONDS)


def _update(seen: Snapshot | None, snapshot: Snapshot, since: str) -> str:
    if seen is not None:
        return snapshot.since(seen)
    return snapshot.live.update if snapshot.name == since else snapshot.whole


def _event(html: str) -> bytes:
    return format_sse_event(data_str=Part(html).update)
