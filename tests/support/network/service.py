"""Services that really listen: one with a few routes, as both of ours have them in common, and one that answers what a test says."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

import httpx2
from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.requests import HTTPConnection

from bdn.core.errors import CacheFullError, NotFoundError, UnauthenticatedError
from bdn.net.api_server import Bearer, bind_tcp, new_service, serving

LIMIT_REQUEST_BYTES = 1000


class Order(BaseModel):
    what: str
    count: int


async def anybody(_: HTTPConnection) -> str:
    """Knows each caller, all of one organisation."""
    return ""


def new_app() -> FastAPI:
    app = new_service("a service", limit_request_bytes=LIMIT_REQUEST_BYTES, authenticate=anybody)

    @app.post("/orders")
    async def place(order: Order) -> Order:
        return order

    @app.get("/orders")
    async def orders(limit: Annotated[int, Query(ge=1)] = 10) -> list[int]:
        return list(range(limit))

    @app.get("/bearer")
    async def bearer(given: Bearer) -> str | None:
        return given

    @app.get("/full")
    async def full() -> None:
        raise CacheFullError(1, 2, 3, 4)

    @app.get("/private")
    async def private() -> None:
        raise UnauthenticatedError

    @app.get("/bug")
    async def bug() -> None:
        raise LookupError("hf_AbCdEf0123456789")

    return app


@asynccontextmanager
async def listening(app: FastAPI, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """The address of the service, on a free port unless ``listener`` says where."""
    bound = listener or bind_tcp("127.0.0.1", 0)
    url = "" if bound.family == socket.AF_UNIX else f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with serving(app, bound):
        yield url


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """An HTTP client of the listening service."""
    async with listening(app) as url, httpx2.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
        yield client


@dataclass
class Scripted:
    """A service that answers by path, in turn, and notes what it was asked."""

    answers: dict[str, list[Response]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        app = new_service("scripted", limit_request_bytes=10**6, authenticate=anybody)

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def answer(path: str, request: Request) -> Response:
            what = f"{request.method} {request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
            self.asked.append((what, dict(request.headers), await request.body()))
            queue = self.answers.get(f"/{path}")
            if not queue:
                raise NotFoundError(f"path /{path}")
            return queue.pop(0)

        return app

    def say(self, path: str, content: object, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.answers.setdefault(path, []).append(Response(body, status, media_type="application/json"))
