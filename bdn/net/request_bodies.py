"""The gate of an API: authenticates callers before it reads bodies, and bounds bodies before they are parsed.

FastAPI reads and parses a body before it runs a route's dependencies, which check permissions; so this gate runs before
the routes.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bdn.core.errors import BdnError, LimitExceededError
from bdn.core.json_bounds import BYTES_PER_ELEMENT, FEW_ELEMENTS, check_json
from bdn.wire.shapes import document_of, status_of

Authenticate = Callable[[HTTPConnection], Awaitable[str]]
KNOW: Final = "know"  # request state, while the connection is a stranger's: called with the caller's organisation
DROP: Final = "drop"  # request state: drops so many bytes of the body
UNTIMED: Final = "untimed"  # request state: lifts the time limit of a request whose application judges the body's pace
CLOSE: Final[Mapping[str, str]] = MappingProxyType({"Connection": "close"})
_LIMITED: Final = "bytes of the request"
_FLAT: Final = "/v1/"  # paths whose errors have ``code`` and ``message`` at the top, too


class _ErrorAnswer(JSONResponse):
    """The error document, in the form that the path of the request has."""

    def __init__(self, error: BdnError, status: int, headers: Mapping[str, str]) -> None:
        self._error, self._given = error, headers
        super().__init__(document_of(error), status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(_FLAT):
            await super().__call__(scope, receive, send)
            return
        content = document_of(self._error, is_flat=True)
        await JSONResponse(content, self.status_code, self._given)(scope, receive, send)


def error_answer(error: BdnError, status: int | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    challenge = {"WWW-Authenticate": "Bearer"} if status_of(error) == 401 else {}
    return _ErrorAnswer(error, status or status_of(error), {**(headers or {}), **challenge})


class RequestBodies:
    """Passes on requests whose body is at most ``limit`` bytes of JSON within bounds; answers all others with an error.

    ``authenticate`` gets only the head, and returns the caller's organisation or raises for an unknown caller. Routes
    check permissions. A request without a body is passed on even for an unknown caller.
    """

    def __init__(self, app: ASGIApp, limit: int, authenticate: Authenticate) -> None:
        self._app = app
        self._limit = limit
        self._elements = max(FEW_ELEMENTS, limit // BYTES_PER_ELEMENT)
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_there = has_body(headers)
        try:
            self._check_announced(headers.get("content-length", ""))
            await self._identify(scope, has_body=is_there)
        except BdnError as error:
            await self._refuse(error, scope, receive, send)
            return
        if not is_there:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > self._limit:
                too_large = LimitExceededError(_LIMITED, len(body), self._limit)
                await self._refuse(too_large, scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        else:
            return  # the client has gone
        content = bytes(body)
        del body
        try:
            check_json(content, self._elements)
        except BdnError as error:
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, _replayed(content, receive), send)

    async def _refuse(self, error: BdnError, scope: Scope, receive: Receive, send: Send) -> None:
        most = 16 * self._limit if has_body(Headers(scope=scope)) else 0
        await answer_early(error_answer(error, headers=CLOSE), most, scope, receive, send)

    def _check_announced(self, announced: str) -> None:
        if re.fullmatch(r"[0-9]{1,30}", announced) and int(announced) > self._limit:
            raise LimitExceededError(_LIMITED, int(announced), self._limit)

    async def _identify(self, scope: Scope, *, has_body: bool) -> None:
        """Authenticate once per connection, and for each body."""
        know = scope.get("state", {}).get(KNOW)
        if know is None and not has_body:
            return
        try:
            organisation = await self._authenticate(HTTPConnection(scope))
        except BdnError:
            if has_body:
                raise
            return  # a route without a body decides itself about unknown callers
        if know is not None:
            know(organisation)


def has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in ("", "0")


def _replayed(content: bytes, receive: Receive) -> Receive:
    """Returns the body once, then the client's further messages."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next


async def answer_early(answer: Response, most: int, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, with ``CLOSE``, and drop up to ``most`` bytes that the client still sends.

    Closing earlier would reset the connection, and the client may never see the response.
    """

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    drop = scope.get("state", {}).get(DROP)
    if drop is None or not most or "expect" in Headers(scope=scope):
        await answer(scope, receive, send)
        return
    await answer(scope, receive, send_open)
    await drop(most)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
