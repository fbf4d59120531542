"""What both HTTP services have in common: the error document for every failure, and how a bearer is read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

import bdn
from bdn.core.errors import BdnError, InternalError, InvalidRequestError, LimitExceededError, NotFoundError
from bdn.wire.errors import ErrorDocument, document_of, status_of

_bearer = HTTPBearer(auto_error=False)


def _bearer_of(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str | None:
    return credentials.credentials if credentials else None


Bearer = Annotated[str | None, Depends(_bearer_of)]


def new_service(title: str, *, limit_request_bytes: int) -> FastAPI:
    """An application without routes that answers every failure with the error document of CONTRACT section 6."""
    app = FastAPI(
        title=title,
        version=bdn.__version__,
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        max_body_size=limit_request_bytes,
        responses={"default": {"model": ErrorDocument, "description": "Any failure"}},
        redoc_url=None,
    )

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
            return _answer(LimitExceededError("bytes of the request", limit_request_bytes + 1, limit_request_bytes))
        return _answer(
            InvalidRequestError(f"{request.method} {request.url.path[:200]}: {error.detail}"), error.status_code
        )

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        return _answer(InternalError(type(error).__name__))  # the server logs it with its traceback

    return app


def _answer(error: BdnError, status: int | None = None) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status_of(error) == 401 else None
    return JSONResponse(document_of(error), status or status_of(error), headers=headers)


def describe_validation(problems: Any) -> str:  # noqa: ANN401 - pydantic's own list of dictionaries
    """One line that names each field and what is wrong with it, without repeating the value: it may be a secret."""
    lines: list[str] = []
    for problem in problems:
        place = ".".join(str(part) for part in problem["loc"] if part != "body") or "the body"
        wrong = "is not a known field" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"{place}: {wrong}")
    return "; ".join(lines)
