"""A service with a few routes, really listening: what both services have in common, without either of them."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx2
from fastapi import FastAPI, Query
from pydantic import BaseModel

from bdn.core.errors import CacheFullError, UnauthenticatedError
from bdn.net.api_server import Bearer, bind_tcp, new_service, serving

LIMIT_REQUEST_BYTES = 1000


class Order(BaseModel):
    what: str
    count: int


def new_app() -> FastAPI:
    app = new_service("a service", limit_request_bytes=LIMIT_REQUEST_BYTES)

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
