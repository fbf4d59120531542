"""What both services answer: one error document for every failure, and text that is text."""

import json
import logging
import re
from collections.abc import AsyncIterator
from urllib.parse import urljoin, urlsplit

import httpx2
import pytest
import pytest_asyncio
from pydantic import BaseModel

from bdn.net.api_server import new_service
from tests.support.network.service import LIMIT_REQUEST_BYTES, anybody, client_of, new_app
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """One service for all these tests: ending one takes a while."""
    async with client_of(new_app()) as client:
        yield client


def refusal_of(response: httpx2.Response) -> tuple[int, str, str]:
    """Status, code and message; anything else than a whole error document fails the test."""
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"code", "message", "retryable", "details"}
    return response.status_code, document["error"]["code"], document["error"]["message"]


JSON = {"Content-Type": "application/json"}
HALVES = [b" " * (LIMIT_REQUEST_BYTES // 2)] * 3


async def pieces_of(contents: list[bytes]) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


@pytest.mark.parametrize(("method", "path", "body", "status", "code", "message"), [
    ("GET", "/nothing/here", b"", 404, "NOT_FOUND", ".*/nothing/here.*"),
    ("GET", "/" + "x" * 1000, b"", 404, "NOT_FOUND", ".{0,400}"),
    ("DELETE", "/full", b"", 405, "INVALID_REQUEST", "DELETE /full: Method Not Allowed; this path accepts GET.*"),
    ("POST", "/orders", HALVES, 413, "LIMIT_EXCEEDED", ".*"),
    ("POST", "/orders", b'{"what": ["hf_secret"], "count": "hf_secret"}', 422, "INVALID_REQUEST",
     "what: Input should be a valid string; count: Input should be a valid integer.*"),
    *(("POST", "/orders", body, 422, "INVALID_REQUEST", "the body: .*") for body in
      (b"{", b"hf_secret", b'{"what": hf_secret}', b"")),
    *(("GET", f"/orders?limit={value}", b"", 422, "INVALID_REQUEST", "query.limit: .*") for value in ("0", "many")),
    ("GET", "/full", b"", 507, "CACHE_FULL", ".*"),
    ("GET", "/private", b"", 401, "UNAUTHENTICATED", ".*"),
    ("GET", "/bug", b"", 500, "INTERNAL", ".*"),
])  # fmt: skip
async def test_every_failure_is_an_error_document_that_repeats_no_value(
    client: httpx2.AsyncClient,
    method: str,
    path: str,
    body: bytes | list[bytes],
    status: int,
    code: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = pieces_of(body) if isinstance(body, list) else body
    response = await client.request(method, path, content=content, headers=JSON)
    assert refusal_of(response)[:2] == (status, code)
    assert re.fullmatch(message, refusal_of(response)[2])
    assert "hf_" not in response.text
    bugs = [record.levelno for record in caplog.records if record.exc_info]
    assert bugs == ([logging.ERROR] if status == 500 else [])


async def test_what_http_itself_asks_for_stands_in_the_head(client: httpx2.AsyncClient) -> None:
    assert (await client.delete("/full")).headers["allow"] == "GET"  # RFC 9110, section 15.5.6
    assert (await client.get("/private")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("size", [LIMIT_REQUEST_BYTES + 1, 10**6])
async def test_a_body_that_announces_to_be_over_the_limit_is_refused(client: httpx2.AsyncClient, size: int) -> None:
    response = await client.post("/orders", content=b" " * size)
    assert refusal_of(response)[:2] == (413, "LIMIT_EXCEEDED")
    details = response.json()["error"]["details"]
    assert details == {"what": "bytes of the request", "value": size, "limit": LIMIT_REQUEST_BYTES}


async def test_a_body_of_exactly_the_limit_is_read(client: httpx2.AsyncClient) -> None:
    body = b'{"what": "chunk", "count": 3}'.ljust(LIMIT_REQUEST_BYTES)
    response = await client.post("/orders", content=body, headers=JSON)
    assert (response.status_code, response.json()) == (200, {"what": "chunk", "count": 3})


async def test_an_error_of_ours_keeps_its_facts(client: httpx2.AsyncClient) -> None:
    error = (await client.get("/full")).json()["error"]
    assert error["retryable"] is True
    sizes = {"needed_bytes": 1, "free_bytes": 2, "leased_bytes": 3, "budget_bytes": 4}
    assert error["details"] == {**sizes, "needed_files": None, "free_files": None}


@pytest.mark.parametrize(
    ("header", "bearer"),
    [
        ("Bearer abc.def", "abc.def"),
        ("bearer abc.def", "abc.def"),
        ("Api-Key abc.def", "abc.def"),
        ("Basic abc", None),
        ("", None),
    ],
)
async def test_the_bearer_is_read_from_its_header(client: httpx2.AsyncClient, header: str, bearer: str | None) -> None:
    response = await client.get("/bearer", headers={"Authorization": header} if header else {})
    assert response.json() == bearer


async def test_the_description_says_that_any_failure_has_this_form(client: httpx2.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for calls in document["paths"].values():
        for call in calls.values():
            schema = call["responses"]["default"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorDocument"}


async def test_the_documentation_needs_no_other_server(client: httpx2.AsyncClient) -> None:
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    named = re.findall(r"""(?:src|href|url)(?:=|:\s*)["']([^"']+)""", page.text)
    assert len(named) == 4  # the page's icon, style and script, and the document
    for address in named:
        assert not urlsplit(address).netloc
        answer = await client.get(urljoin("/docs", address))
        assert (answer.status_code, bool(answer.content)) == (200, True), address
    assert (await client.post("/docs/swagger-ui.css")).headers["allow"] == "GET, HEAD"
    assert refusal_of(await client.get("/docs/nothing"))[:2] == (404, "NOT_FOUND")


HALF = '{"text": "%s"}'
WRITTEN = {
    "escaped": (HALF % "\\ud83d").encode(),
    "second half": (HALF % "\\uDE00").encode(),
    "as bytes": (HALF % "\ud83d").encode(errors="surrogatepass"),
    "as a name": b'{"text": "", "\\ud83d": 1}',
}


class Said(BaseModel):
    text: str


@pytest_asyncio.fixture(loop_scope="module")
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    app = new_service("a service", limit_request_bytes=10**6, authenticate=anybody)

    @app.post("/said")
    async def said(body: Said) -> Said:
        return body

    @app.post("/unread")
    async def unread() -> str:
        return "nothing was read"

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://service") as client:
        yield client


@pytest.mark.promise("hostile-input")
@pytest.mark.parametrize("written", WRITTEN)
async def test_half_a_surrogate_pair_is_refused_however_it_is_written(
    http: httpx2.AsyncClient, written: str, tally: Tally
) -> None:
    answer = await http.post("/said", content=WRITTEN[written], headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "INVALID_REQUEST")
    assert "surrogate" in answer.json()["error"]["message"]
    tally.add(scenarios=1, refused=1)


@pytest.mark.promise("hostile-input")
@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "\\ud83d", "\0", "\N{HANGUL SYLLABLE HIH}"])
async def test_what_is_text_is_taken_however_it_is_written(http: httpx2.AsyncClient, text: str, tally: Tally) -> None:
    escaped = json.dumps({"text": text})
    plain = json.dumps({"text": text}, ensure_ascii=False)
    for body in (escaped.encode(), plain.encode()):
        answer = await http.post("/said", content=body, headers=JSON)
        assert (answer.status_code, answer.json()) == (200, {"text": text})
    tally.add(scenarios=2)


@pytest.mark.promise("hostile-input")
@pytest.mark.parametrize("path", ["/said", "/unread"])
async def test_a_body_that_is_not_json__is_refused_on_every_route(
    http: httpx2.AsyncClient, path: str, tally: Tally
) -> None:
    for body in (b"\0\0\0", '{"text": "x"}'.encode("utf-16"), b"[" * 1000 + b'"\\ud83d"'):
        answer = await http.post(path, content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "INVALID_REQUEST"), answer.text
    tally.add(scenarios=3, refused=3)
