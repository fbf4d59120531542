"""Both services under requests that their own OpenAPI documents make up, right and wrong: never a 500, a traceback, or a file outside."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core import NotSet
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bdn.net.api_server import bind_tcp, serving
from node_agent.api import build_app
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig
from tests.support.agent.site import serving_agent
from tests.support.crash.spoiled import Spoiler
from tests.support.mirror.service import Json, mirror_under_test
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("hostile-input")

NOWHERE = "http://127.0.0.1:1"  # which the egress guard refuses, so that no request waits for an upstream
TOKEN = "operator-token"
CONFORMANCE = [status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass
class Fuzzed:
    """Every operation of one service, with requests that are right and requests that are wrong by its own description."""

    app: FastAPI
    http: httpx2.AsyncClient  # that needs no socket
    headers: Mapping[str, str]
    tally: Tally

    async def run(self, examples: int) -> None:
        listener = bind_tcp("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with serving(self.app, listener):
            await asyncio.to_thread(self._operations, f"{url}/openapi.json", examples)

    def _operations(self, document: str, examples: int) -> None:
        for found in schemathesis.openapi.from_url(document).get_all_operations():
            operation: Any = found.ok()  # type: ignore[union-attr] # or this fails, as it should
            self._operation(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), examples)
            with suppress(Unsatisfiable):  # every request of some operations is right
                self._operation(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), examples)

    async def spoil(self, *also: str) -> None:
        """What strategies for text never make up, in every place: they write UTF-8, and seldom a NUL."""
        document = (await self.http.get("/openapi.json")).json()
        for one in Spoiler(document, also).requests():
            headers = {**self.headers, "Content-Type": "application/json"}
            response = await self.http.request(one.method, one.path, content=one.body, headers=headers)
            shown = f"{one.method} {one.path:.200} {one.what}: {response.status_code} {response.text[:300]}"
            assert response.status_code < 500, shown  # nothing is away, so that nobody shall come again later
            self._judge(response, shown, has_body=one.method != "head")

    def _operation(self, cases: Any, examples: int) -> None:
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def attempt(case: Any) -> None:
            self._attempt(case)

        attempt()

    def _attempt(self, case: Any) -> None:
        self._hurry(case)
        response = case.call(headers=dict(self.headers), timeout=20)
        shown = f"{case.method} {response.request.url} {response.request.body!r:.500}: {response.status_code} {response.text[:300]}"
        self._judge(response, shown, has_body=case.method != "HEAD")
        case.validate_response(response, checks=CONFORMANCE)

    def _judge(self, response: Any, shown: str, *, has_body: bool = True) -> None:
        self.tally.add(scenarios=1)
        assert response.status_code != 500, shown
        if response.status_code >= 400 and has_body:
            error = json.loads(response.text)["error"]
            assert set(error) == {"code", "message", "retryable", "details"}, shown
            assert error["code"] != "INTERNAL", shown
            assert "Traceback" not in response.text, shown
            self.tally.add(refused=1)

    @staticmethod
    def _hurry(case: Any) -> None:
        """Nobody waits: a heartbeat may be kept open for half a minute, and so may a look at what does not end."""
        if isinstance(case.body, dict) and isinstance(case.body.get("wait_seconds"), int | float):
            case.body["wait_seconds"] = 0
        if not isinstance(case.query, NotSet) and isinstance((case.query or {}).get("wait"), int | float):
            case.query["wait"] = 0


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of which everything but ``data`` must stay as it is."""
    (tmp_path / "beside").write_text("untouched")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/loop").symlink_to("loop")
    yield tmp_path / "data"
    assert {name for name in tree(tmp_path) if name.partition("/")[0] != "data"} == {"beside"}
    assert (tmp_path / "beside").read_text() == "untouched"


@pytest.fixture(autouse=True)
def nothing_is_logged_as_a_bug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info and record.levelno >= ERROR] == []


@pytest.mark.parametrize("auth", ["off", "token"])
async def test_the_mirror_answers_whatever_its_own_description_makes_up(
    auth: str, outside: Path, tally: Tally, scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BDN_EGRESS_ALLOW", "")
    for name in ("HF_ENDPOINT", "AWS_ENDPOINT_URL_S3", "BDN_R2_ENDPOINT_URL"):
        monkeypatch.setenv(name, NOWHERE)
    given_token: Json = {"auth": auth, "token": TOKEN} if auth == "token" else {}
    headers = {"Authorization": f"Bearer {TOKEN}"} if auth == "token" else {}
    async with mirror_under_test(outside, **given_token) as mirror:
        fuzzed = Fuzzed(mirror.service.api, mirror.http, headers, tally)
        # What is looked for is compared with it.
        begun = {"weights": [{"source": "hf://org/model", "mount_location": "/m"}]}
        assert (await mirror.http.post("/mirror", json=begun, headers=headers)).status_code == 202
        await fuzzed.spoil()
        if auth == "off" or scale.is_full:  # who asks changes nothing of what is made up
            await fuzzed.run(scale.of(3, 10))
        assert (await mirror.http.get("/healthz")).status_code == 200


async def test_the_agent_answers_whatever_its_own_description_makes_up(
    outside: Path, tally: Tally, scale: Scale
) -> None:
    with AgentMirror().running() as mirror:
        async with serving_agent(Rig(mirror, outside)) as site:
            fuzzed = Fuzzed(build_app(site.agent), site.http, {}, tally)
            await fuzzed.spoil(str(outside / "loop"))
            await fuzzed.run(scale.of(3, 10))
            assert await site.client.ready()
