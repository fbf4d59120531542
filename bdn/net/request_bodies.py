"""The gate of an API: authenticates the caller before it reads a body, and checks size, depth and elements before the body is parsed.

FastAPI reads and parses a body before it runs a route's dependencies, which check what the caller may do; so this gate runs before the routes.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bdn.core.errors import BdnError, LimitExceededError
from bdn.core.json_bounds import BYTES_PER_ELEMENT, FEW_ELEMENTS, check_json
from bdn.wire.shapes import document_of, status_of

Authenticate = Callable[[HTTPConnection], Awaitable[None]]
_LIMITED: Final = "bytes of the request"


def error_answer(error: BdnError, status: int | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The error's document."""
    challenge = {"WWW-Authenticate": "Bearer"} if status_of(error) == 401 else {}
    return JSONResponse(document_of(error), status or status_of(error), headers={**(headers or {}), **challenge})


class RequestBodies:
    """Passes on requests whose body is at most ``limit`` bytes of JSON within bounds; answers all other requests with an error.

    ``authenticate`` sees the head alone and raises for an unknown caller. Routes check what a caller may do. A request
    without a body is passed on at once.
    """

    def __init__(self, app: ASGIApp, limit: int, authenticate: Authenticate) -> None:
        self._app = app
        self._limit = limit
        self._elements = max(FEW_ELEMENTS, limit // BYTES_PER_ELEMENT)
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or not _has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        try:
            self._check_announced(headers.get("content-length", ""))
            await self._authenticate(HTTPConnection(scope))
        except BdnError as error:
            await _refuse(error, self._limit, scope, receive, send)
            return
        body = bytearray()
        try:
            while (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                if len(body) > self._limit:
                    raise LimitExceededError(_LIMITED, len(body), self._limit)
                if not message.get("more_body", False):
                    break
            else:
                return  # the client has gone
            content = bytes(body)
            del body
            check_json(content, self._elements)
        except BdnError as error:
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, _Replayed(content, receive), send)

    def _check_announced(self, announced: str) -> None:
        if re.fullmatch(r"[0-9]{1,30}", announced) and int(announced) > self._limit:
            raise LimitExceededError(_LIMITED, int(announced), self._limit)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in ("", "0")


class _Replayed:
    """The body, once; then what else the client does."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self._content: bytes | None = content
        self._receive = receive

    async def __call__(self) -> Message:
        if self._content is None:
            return await self._receive()
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}


async def _refuse(error: BdnError, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, and drop up to ``limit`` bytes that the client still sends: closing earlier would reset the connection.

    A client that is reset while it sends may never see the answer.
    """

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await error_answer(error)(scope, receive, send_open)
    dropped = 0
    if "expect" not in Headers(scope=scope):
        while dropped <= limit and (message := await receive())["type"] == "http.request":
            dropped += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
