"""Server-sent events: one document after the other, for as long as the client reads.

FastAPI's own stream is not used: where a listener leaves while its socket is full, it closes a queue under the task that still
writes to it, and uvicorn logs the traceback of what is no failure of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi.sse import format_sse_event
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from bdn.core.groups import single_error

_Document = TypeVar("_Document", bound=BaseModel)
_MEDIA_TYPE: Final = "text/event-stream"

EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`progress` at least every second, then `done`; the data is the document as JSON",
        "content": {
            _MEDIA_TYPE: {
                "itemSchema": {
                    "type": "object",
                    "required": ["event", "data"],
                    "properties": {"event": {"enum": ["progress", "done"]}, "data": {"type": "string"}},
                }
            }
        },
    }
}


class EventStream(StreamingResponse):
    """Each of ``documents`` as an event, ``done`` for the one that ``is_last`` and ``progress`` for those before it.

    A client that does not read holds up ``documents``, which are closed when it leaves. A route of this class says that its
    status is 200, which FastAPI would read from a constructor with a ``status_code``.
    """

    media_type = _MEDIA_TYPE

    def __init__(self, documents: AsyncGenerator[_Document], is_last: Callable[[_Document], bool]) -> None:
        self._events = _written(documents, is_last)
        # A proxy such as nginx shall neither keep them nor collect them.
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send them until the client leaves.

        What is under way then is canceled once, and may end in order. Starlette's own way cancels it again at each await: a
        look at the database could not give its connection back.
        """
        with single_error():
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self.stream_response(send))
                leaving = group.create_task(self.listen_for_disconnect(receive))
                sending.add_done_callback(lambda _: leaving.cancel())
                leaving.add_done_callback(lambda _: sending.cancel())

    async def stream_response(self, send: Send) -> None:
        """Send them all. Whoever is canceled in here has closed them."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def _written(documents: AsyncGenerator[_Document], is_last: Callable[[_Document], bool]) -> AsyncGenerator[bytes]:
    async with aclosing(documents):
        async for document in documents:
            event = "done" if is_last(document) else "progress"
            yield format_sse_event(event=event, data_str=document.model_dump_json())
