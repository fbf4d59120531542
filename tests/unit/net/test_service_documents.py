"""Every failure of a service is the error document of docs/contract.md, whoever in the framework noticed it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import httpx2
import pytest
import pytest_asyncio

from tests.support.network.service import LIMIT_REQUEST_BYTES, client_of, new_app

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


async def test_what_is_right_is_answered(client: httpx2.AsyncClient) -> None:
    response = await client.post("/orders", json={"what": "chunk", "count": 3})
    assert (response.status_code, response.json()) == (200, {"what": "chunk", "count": 3})


async def test_an_unknown_path_is_not_found(client: httpx2.AsyncClient) -> None:
    status, code, message = refusal_of(await client.get("/nothing/here"))
    assert (status, code) == (404, "NOT_FOUND")
    assert "/nothing/here" in message


async def test_a_very_long_path_is_not_repeated_in_full(client: httpx2.AsyncClient) -> None:
    _, _, message = refusal_of(await client.get("/" + "x" * 5000))
    assert len(message) < 400


async def test_another_method_is_refused_with_those_that_are_allowed(client: httpx2.AsyncClient) -> None:
    response = await client.delete("/full")
    assert refusal_of(response) == (405, "INVALID_REQUEST", "DELETE /full: Method Not Allowed")
    assert response.headers["allow"] == "GET"  # RFC 9110, section 15.5.6


@pytest.mark.parametrize("size", [LIMIT_REQUEST_BYTES + 1, 10**6])
async def test_a_body_that_announces_to_be_over_the_limit_is_refused(client: httpx2.AsyncClient, size: int) -> None:
    response = await client.post("/orders", content=b" " * size)
    assert refusal_of(response)[:2] == (413, "LIMIT_EXCEEDED")
    details = response.json()["error"]["details"]
    assert details == {"what": "bytes of the request", "value": size, "limit": LIMIT_REQUEST_BYTES}


async def test_a_body_that_turns_out_to_be_over_the_limit_is_refused(client: httpx2.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * (LIMIT_REQUEST_BYTES // 2)

    response = await client.post("/orders", content=pieces(), headers={"Content-Type": "application/json"})
    assert refusal_of(response)[:2] == (413, "LIMIT_EXCEEDED")


async def test_a_body_of_exactly_the_limit_is_read(client: httpx2.AsyncClient) -> None:
    body = b'{"what": "chunk", "count": 3}'.ljust(LIMIT_REQUEST_BYTES)
    response = await client.post("/orders", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


async def test_a_body_of_the_wrong_form_is_refused_by_field_and_without_its_values(client: httpx2.AsyncClient) -> None:
    status, code, message = refusal_of(await client.post("/orders", json={"what": ["hf_secret"], "count": "hf_secret"}))
    assert (status, code) == (422, "INVALID_REQUEST")
    assert message.startswith("what: Input should be a valid string; count: Input should be a valid integer")
    assert "hf_secret" not in message


@pytest.mark.parametrize("body", [b"{", b"hf_secret", b'{"what": hf_secret}', b""])
async def test_a_body_that_is_no_json_is_refused(client: httpx2.AsyncClient, body: bytes) -> None:
    response = await client.post("/orders", content=body, headers={"Content-Type": "application/json"})
    status, code, message = refusal_of(response)
    assert (status, code) == (422, "INVALID_REQUEST")
    assert message.startswith("the body: ")
    assert "hf_secret" not in response.text


async def test_a_query_of_the_wrong_form_is_refused_by_name(client: httpx2.AsyncClient) -> None:
    for value in ("0", "many"):
        status, code, message = refusal_of(await client.get("/orders", params={"limit": value}))
        assert (status, code) == (422, "INVALID_REQUEST")
        assert message.startswith("query.limit: ")


async def test_an_error_of_ours_keeps_its_code_status_and_facts(client: httpx2.AsyncClient) -> None:
    response = await client.get("/full")
    assert refusal_of(response)[:2] == (507, "CACHE_FULL")
    error = response.json()["error"]
    assert error["retryable"] is True
    sizes = {"needed_bytes": 1, "free_bytes": 2, "leased_bytes": 3, "budget_bytes": 4}
    assert error["details"] == {**sizes, "needed_files": None, "free_files": None}


async def test_who_is_not_known_is_told_how_to_say_who_he_is(client: httpx2.AsyncClient) -> None:
    response = await client.get("/private")
    assert refusal_of(response)[:2] == (401, "UNAUTHENTICATED")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_bug_is_an_internal_error_that_tells_nothing_and_is_logged(
    client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    response = await client.get("/bug")
    assert refusal_of(response)[:2] == (500, "INTERNAL")
    assert "hf_AbCdEf" not in response.text
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.ERROR]


@pytest.mark.parametrize(
    ("header", "bearer"),
    [("Bearer abc.def", "abc.def"), ("bearer abc.def", "abc.def"), ("Basic abc", None), ("", None)],
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
