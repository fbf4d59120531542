"""What both HTTP services have in common: routes that are built once, the error document for every failure, the bearer.

Building a route costs a millisecond, so routers are made when their module is imported. What a route needs of one running
program is ``provided`` by the application that serves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bdn
from bdn.core.errors import BdnError, InternalError, InvalidRequestError, LimitExceededError, NotFoundError
from bdn.wire.errors import ErrorDocument, document_of, status_of

_LIMITED: Final = "bytes of the request"
# Where half a surrogate pair may stand: as an escape, as bytes, or in a body of UTF-16, which JSON's parser takes as well.
_HALF: Final = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00")
_Kind = TypeVar("_Kind")
_bearer = HTTPBearer(auto_error=False)


def _bearer_of(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str | None:
    return credentials.credentials if credentials else None


Bearer = Annotated[str | None, Depends(_bearer_of)]


def provided(kind: type[_Kind]) -> _Kind:
    """A route's dependency: the object of this class that was given to ``new_service``."""

    async def find(request: Request) -> _Kind:
        found: _Kind = request.app.state.provided[kind]
        return found

    return cast("_Kind", Depends(find))


async def _check_text(request: Request) -> None:
    """Refuse a body with half a surrogate pair in its text: no answer, file or database could hold what was made of it."""
    body = await request.body() if request.method in ("POST", "PUT") else b""
    if not _HALF.search(body):
        return
    try:
        place = _place_of_half(json.loads(body))
    except (ValueError, RecursionError):
        return  # not JSON: a route that reads it says so
    if place is not None:
        raise InvalidRequestError(f"{place.lstrip('.') or 'the body'}: half a surrogate pair, which is no text")


def _place_of_half(value: Any, place: str = "") -> str | None:  # noqa: ANN401 - any JSON
    """Where in a document text is none, such as ``.weights.0.source``."""
    match value:
        case str():
            return place if any("\ud800" <= sign <= "\udfff" for sign in value) else None
        case list():
            parts = [(f"{place}.{index}", one) for index, one in enumerate(value)]
        case dict():
            parts = [(place, name) for name in value] + [(f"{place}.{name}", one) for name, one in value.items()]
        case _:
            return None
    return next((found for part, one in parts if (found := _place_of_half(one, part)) is not None), None)


_DEPENDENCIES: Final = [Depends(_check_text)]
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {"default": {"model": ErrorDocument, "description": "Any failure"}}


class _Service(FastAPI):
    """Its document says of failures what they are: JSON also where the answer is a stream or a chunk's bytes."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            for path in super().openapi()["paths"].values():
                for operation in path.values():
                    (schema,) = operation["responses"]["default"]["content"].values()
                    operation["responses"]["default"]["content"] = {"application/json": schema}
        return super().openapi()


def new_router(tag: str) -> APIRouter:
    """A router for applications of ``new_service``."""
    return APIRouter(tags=[tag], dependencies=_DEPENDENCIES, responses=_RESPONSES)


def new_service(
    title: str, *, limit_request_bytes: int, routers: Iterable[APIRouter] = (), provides: Iterable[object] = ()
) -> FastAPI:
    """An application that answers every failure with the error document of docs/contract.md.

    ``provides`` are the objects that the routes of ``routers`` ask for by their classes.
    """
    app = _Service(
        title=title,
        version=bdn.__version__,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        responses=_RESPONSES,
        redoc_url=None,
        dependencies=_DEPENDENCIES,
    )
    app.state.provided = {type(each): each for each in provides}
    for router in routers:
        app.router.routes.extend(router.routes)  # ``include_router`` would build them again
    app.add_middleware(_LimitedRequests, limit=limit_request_bytes)

    @app.exception_handler(BdnError)
    async def on_error(_: Request, error: BdnError) -> JSONResponse:
        return _answer(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(InvalidRequestError(describe_validation(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return _answer(NotFoundError(f"path {request.url.path[:200]}"))
        if error.status_code == 413:
            return _answer(LimitExceededError(_LIMITED, limit_request_bytes + 1, limit_request_bytes))
        problem = InvalidRequestError(f"{request.method} {request.url.path[:200]}: {error.detail}")
        return _answer(problem, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        return _answer(InternalError(type(error).__name__))  # the server logs it with its traceback

    return app


class _LimitedRequests:
    """Refuses a body over the limit, whether its length is announced or not.

    ``FastAPI(max_body_size=…)`` does the same, but answers an announced length in plain text, past our handlers.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if re.fullmatch(r"[0-9]{1,30}", announced) and int(announced) > self._limit:
            await _answer(LimitExceededError(_LIMITED, int(announced), self._limit))(scope, receive, send)
            return
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413)  # an error of ours would be taken for a body that cannot be parsed
            return message

        await self._app(scope, receive_limited, send)


def _answer(error: BdnError, status: int | None = None, headers: Mapping[str, str] | None = None) -> JSONResponse:
    challenge = {"WWW-Authenticate": "Bearer"} if status_of(error) == 401 else {}
    return JSONResponse(document_of(error), status or status_of(error), headers={**(headers or {}), **challenge})


def describe_validation(problems: Any) -> str:  # noqa: ANN401 - pydantic's own list of dictionaries
    """One line that names each field and what is wrong with it, without repeating the value: it may be a secret."""
    lines: list[str] = []
    for problem in problems:
        parts = [str(part) for part in problem["loc"] if part != "body"]
        place = "the body" if not parts or problem["type"] == "json_invalid" else ".".join(parts)
        wrong = "is not a known field" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{place}: {wrong}")
    return "; ".join(lines)
