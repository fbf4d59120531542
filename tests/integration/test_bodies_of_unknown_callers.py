"""Nothing of a body is read before its caller is known: each route of both services, by their OpenAPI documents."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.types import ASGIApp, Message

from node_agent.api import build_app
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.mirror.service import mirror_under_test

pytestmark = pytest.mark.promise("hostile-input")
BEARERS = (None, "nonsense", "bdn_" + "0" * 40, "eyJhbGciOiJFZERTQSIsImtpZCI6IjAifQ.e30.AAAA")


async def answered(app: ASGIApp, method: str, path: str, bearer: str | None) -> tuple[int, int]:
    """The status, and how many messages of the body were received before it."""
    received, before, status = 0, -1, 0

    async def receive() -> Message:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": b"[0]", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal before, status
        if message["type"] == "http.response.start":
            before, status = received, message["status"]

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"3")]
    if bearer is not None:
        headers.append((b"authorization", b"Bearer " + bearer.encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.upper(),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 1),
        "state": {},
    }
    await app(scope, receive, send)
    return status, before


@pytest_asyncio.fixture
async def mirror(tmp_path: Path) -> AsyncIterator[ASGIApp]:
    async with mirror_under_test(tmp_path / "mirror", auth="token", token="operator", work=False) as running:
        yield running.service.api


async def test_mirror__reads_no_body_of_an_unknown_caller(mirror: ASGIApp) -> None:
    operations = [
        (method, re.sub(r"\{\w+(:path)?\}", "x", path))
        for path, methods in mirror.openapi()["paths"].items()  # type: ignore[attr-defined] # it is FastAPI's
        for method in methods
    ]
    assert len(operations) > 50
    for bearer in BEARERS:
        for method, path in (*operations, ("post", "/nowhere"), ("post", "/docs"), ("put", "/openapi.json")):
            status, before = await answered(mirror, method, path, bearer)
            assert (status in (401, 403), before) == (True, 0), (method, path, bearer, status, before)
    assert (await answered(mirror, "post", "/mirror", "operator"))[1] == 1


async def test_agent__reads_no_body_of_a_pull_that_is_not_its_users(tmp_path: Path) -> None:
    with AgentMirror().running() as mirror:
        async with Rig(mirror, tmp_path, {"exposure": "symlink"}).agent() as agent:
            app = build_app(agent)
            for path in ("/pulls", "/pulls/checks"):
                assert await answered(app, "post", path, None) == (401, 0)
