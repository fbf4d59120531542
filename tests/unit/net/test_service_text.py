"""What both services say of a body whose text is none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from pydantic import BaseModel

from bdn.net.api_server.service import new_service
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("hostile-input")
HALF = '{"text": "%s"}'
WRITTEN = {
    "escaped": (HALF % "\\ud83d").encode(),
    "second half": (HALF % "\\uDE00").encode(),
    "as bytes": (HALF % "\ud83d").encode(errors="surrogatepass"),
    "utf-16": (HALF % "\ud83d").encode("utf-16", errors="surrogatepass"),
    "as a name": b'{"text": "", "\\ud83d": 1}',
}


class Said(BaseModel):
    text: str


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    app = new_service("a service", limit_request_bytes=10**6)

    @app.post("/said")
    async def said(body: Said) -> Said:
        return body

    @app.post("/unread")
    async def unread() -> str:
        return "nothing was read"

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://service") as client:
        yield client


@pytest.mark.parametrize("written", WRITTEN)
async def test_half_a_surrogate_pair_is_refused_however_it_is_written(
    http: httpx2.AsyncClient, written: str, tally: Tally
) -> None:
    answer = await http.post("/said", content=WRITTEN[written], headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "INVALID_REQUEST")
    assert "surrogate" in answer.json()["error"]["message"]
    tally.add(scenarios=1, refused=1)


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "\\ud83d", "\0", "\N{HANGUL SYLLABLE HIH}"])
async def test_what_is_text_is_taken_however_it_is_written(http: httpx2.AsyncClient, text: str, tally: Tally) -> None:
    escaped = json.dumps({"text": text})
    plain = json.dumps({"text": text}, ensure_ascii=False)
    for body in (escaped.encode(), plain.encode(), plain.encode("utf-16")):
        answer = await http.post("/said", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()) == (200, {"text": text})
    tally.add(scenarios=3)


async def test_a_body_that_is_not_json_is_the_routes_own_business(http: httpx2.AsyncClient, tally: Tally) -> None:
    for body in (b"\0\0\0", b"[" * 100_000 + b'"\\ud83d"'):
        for path, status in (("/said", 422), ("/unread", 200)):
            answer = await http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code in (status, 400), answer.text
    tally.add(scenarios=2, refused=2)
