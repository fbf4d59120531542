"""Our clients: what they ask, what they believe of an answer, and for how long they ask again while there is none."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import BdnError, InternalError, NotFoundError, QuotaExceededError, UnauthenticatedError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.api_clients import AgentClient, MirrorClient
from bdn.net.api_server import bind_tcp
from bdn.net.client import DataPlane, OutageRetry
from bdn.wire.mirror_schema import Mirror, MirrorRequestBody, MirrorSource, WeightsSourceBody
from bdn.wire.shapes import ServiceUnreachableError, WrongDocumentError, document_of
from bdn.wire.stage_schema import StageDocument, StageRequest
from tests.support.content.layouts import held_of, whole
from tests.support.network.service import Scripted, listening

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOW = datetime(2026, 11, 20, tzinfo=UTC)
REQUEST = MirrorRequestBody(weights=[WeightsSourceBody(source="hf://o/r", mount_location="/m")])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Scripted]:
    scripted = Scripted()
    async with listening(scripted.app()) as scripted.url:
        yield scripted


@pytest.fixture
def service(shared: Scripted) -> Scripted:
    shared.answers.clear()
    shared.asked.clear()
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Scripted) -> AsyncIterator[MirrorClient]:
    async with MirrorClient(service.url, "token") as client:
        yield client


def mirror(status: str = "READY") -> dict[str, Any]:
    source = MirrorSource(source="hf://o/r", mount_location="/m", status="READY")
    found = Mirror(id="mir_1", status="READY", created_at=NOW, sources=[source]).model_dump(mode="json")
    return found | {"status": status}


async def test_a_call_sends_the_token_and_the_body_and_reads_the_answer(
    service: Scripted, client: MirrorClient
) -> None:
    service.say("/mirror", mirror(), 202)
    answered = await client.request(REQUEST)
    assert (answered.id, answered.status, answered.sources[0].mount_location) == ("mir_1", "READY", "/m")
    what, headers, body = service.asked[0]
    sent = (what, headers["authorization"], headers["content-type"])
    assert sent == ("POST /mirror", "Bearer token", "application/json")
    assert MirrorRequestBody.model_validate_json(body) == REQUEST


async def test_a_token_in_a_file_is_read_at_each_request(service: Scripted, tmp_path: Path) -> None:
    """The kubelet replaces it before it expires."""
    own, agents = tmp_path / "token", tmp_path / "agent"
    agents.write_text("of-the-agent")
    async with (
        MirrorClient(service.url, token_file=own) as client,
        MirrorClient(service.url, "grant", agent_token=agents) as committing,
    ):
        for content in ("first\n", "second"):
            own.write_text(content)
            service.say("/mirror/mir_1", mirror())
            await client.mirror("mir_1")
            assert service.asked[-1][1]["authorization"] == f"Bearer {content.strip()}"
        service.say("/mirror/mir_1", mirror())
        await committing.mirror("mir_1")
        headers = service.asked[-1][1]
        assert (headers["authorization"], headers["bdn-agent-token"]) == ("Bearer grant", "of-the-agent")
        asked = len(service.asked)
        for content in ("", "\n", "two words", "two\nlines", "t\u00f6ken"):
            own.write_text(content)
            with pytest.raises(UnauthenticatedError, match="token"):
                await client.mirror("mir_1")
        own.unlink()
        with pytest.raises(UnauthenticatedError, match="No such file"):
            await client.mirror("mir_1")
        assert len(service.asked) == asked


async def test_an_address_may_have_a_path_of_its_own_and_without_a_token_nobody_is_named(service: Scripted) -> None:
    service.say("/behind/ingress/mirror/mir_1", mirror())
    async with MirrorClient(f"{service.url}/behind/ingress/") as client:
        assert (await client.mirror("mir_1")).id == "mir_1"
    assert "authorization" not in service.asked[0][1]


@pytest.mark.parametrize(("seconds", "sent"), [(0, "0.0"), (12.5, "12.5"), (1000, "60.0"), (-3, "0.0")])
async def test_a_wait_is_never_longer_than_the_contract_allows(
    service: Scripted, client: MirrorClient, seconds: float, sent: str
) -> None:
    service.say("/mirror/mir_1", mirror())
    await client.mirror("mir_1", seconds)
    assert service.asked[0][0] == f"GET /mirror/mir_1?wait={sent}"


async def test_following_ends_with_a_terminal_state(service: Scripted, client: MirrorClient) -> None:
    for status in ("PENDING", "SYNCING", "FAILED", "READY"):
        service.say("/mirror/mir_1", mirror(status))
    assert [seen.status async for seen in client.follow("mir_1", 0)] == ["PENDING", "SYNCING", "FAILED"]


async def test_an_error_document_keeps_its_code_its_message_and_its_facts(
    service: Scripted, client: MirrorClient
) -> None:
    original = NotFoundError("mirror mir_1")
    service.say("/mirror/mir_1", document_of(original), 404)
    with pytest.raises(BdnError) as raised:
        await client.mirror("mir_1")
    assert (raised.value.code, str(raised.value), raised.value.transient) == ("NOT_FOUND", str(original), False)
    assert raised.value.details() == {"what": "mirror mir_1"}


@pytest.mark.parametrize(("status", "code"), [(500, "INTERNAL"), (502, "STORE_UNAVAILABLE"), (307, "INTERNAL")])
async def test_an_answer_of_somebody_else_is_an_error(
    service: Scripted, client: MirrorClient, status: int, code: str
) -> None:
    service.say("/agents", b"<html>", status)
    with pytest.raises(BdnError) as raised:
        await client.agents()
    assert (raised.value.code, raised.value.transient) == (code, code == "STORE_UNAVAILABLE")


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"items": 3}', b"\xff"])
async def test_a_success_that_is_something_else_is_an_internal_error(
    service: Scripted, client: MirrorClient, content: bytes
) -> None:
    service.say("/agents", content)
    with pytest.raises(InternalError, match="is not a"):
        await client.agents()


@pytest.mark.parametrize(("address", "said"), [
    ("http://127.0.0.1:{port}", "no mirror answers at http://127.0.0.1:{port} .*: start one with 'bdn up'"),
    ("mirror:8460", "unsupported protocol"),
    ("unix:{folder}/agent.sock", "no agent answers at .*agent.sock .*: start one with 'bdn up'"),
])  # fmt: skip
async def test_a_service_that_is_not_there_is_unreachable(tmp_path: Path, address: str, said: str) -> None:
    with bind_tcp("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    async with MirrorClient(address.format(port=port, folder=tmp_path)) as client:
        with pytest.raises(ServiceUnreachableError, match=said.format(port=port)) as raised:
            await client.agents()
        assert (raised.value.code, raised.value.transient) == ("STORE_UNAVAILABLE", True)
        assert not await client.ready()


async def test_a_service_that_hangs_up_is_unreachable() -> None:
    with bind_tcp("127.0.0.1", 0) as listener:
        async with MirrorClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.05) as client:
            with pytest.raises(ServiceUnreachableError, match="no complete answer within"):
                await client.agents()


async def test_a_request_that_is_canceled_in_the_handshake_leaves_no_connection() -> None:
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        has_begun.set()
        await reader.read()
        is_over.set()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server, MirrorClient(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        asking = asyncio.create_task(client.agents())
        async with asyncio.timeout(60):
            await has_begun.wait()
            asking.cancel()
            await asyncio.wait([asking])
            await is_over.wait()
        assert asking.cancelled()


async def test_a_service_that_can_work_is_ready(service: Scripted, client: MirrorClient) -> None:
    service.say("/readyz", {})
    assert await client.ready()
    service.say("/readyz", document_of(NotFoundError("database")), 503)
    assert not await client.ready()


async def test_a_stage_is_followed_over_a_unix_socket(tmp_path: Path) -> None:
    scripted, path = Scripted(), f"{tmp_path}/s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    stage = StageDocument(id="stg_1", job_id="job", state="PENDING", created_at=NOW, mounts=[]).model_dump(mode="json")
    scripted.say("/stages", stage)
    for state in ("STAGING", "READY"):
        scripted.say("/stages/stg_1", stage | {"state": state})
    async with listening(scripted.app(), listener), AgentClient(f"unix:{path}") as client:
        assert (await client.stage(StageRequest(job_id="job", grant="g"))).state == "PENDING"
        assert [stage.state async for stage in client.follow("stg_1", 0)] == ["STAGING", "READY"]


SILENCE = ServiceUnreachableError("http://mirror", "connection reset")


class Asked:
    """Answers in turn; an error is raised."""

    def __init__(self, *answers: str | BdnError) -> None:
        self.times = 0
        self._answers = answers

    async def __call__(self) -> str:
        answer = self._answers[min(self.times, len(self._answers) - 1)]
        self.times += 1
        if isinstance(answer, BdnError):
            raise answer
        return answer


def persistence(seconds: float, told: list[BdnError | None]) -> OutageRetry:
    return OutageRetry(told.append, RetryPolicy(seconds, attempts=2, first_seconds=0.001, longest_seconds=0.001))


async def test_a_silence_is_endured_and_told_once_and_so_is_its_end() -> None:
    told: list[BdnError | None] = []
    asked = Asked(SILENCE, SILENCE, SILENCE, "SYNCING", SILENCE, "READY")
    asking = persistence(60, told)

    assert [await asking.ask(asked), await asking.ask(asked)] == ["SYNCING", "READY"]
    assert told == [SILENCE, None, SILENCE, None]


async def test_what_is_no_outage_is_raised_at_once_and_ends_one() -> None:
    told: list[BdnError | None] = []
    full = QuotaExceededError(2, 1)
    asked = Asked(SILENCE, full, "READY")
    with pytest.raises(QuotaExceededError):
        await persistence(60, told).ask(asked, but=lambda error: error is full)
    assert (told, asked.times) == ([SILENCE, None], 2)


@pytest.mark.parametrize(("error", "seconds", "is_endured"), [
    (SILENCE, 0.05, True), (NotFoundError("mirror mir_1"), 60, False),
])  # fmt: skip
async def test_a_silence_that_lasts_is_an_error_and_what_does_not_pass_is_one_at_once(
    error: BdnError, seconds: float, is_endured: bool
) -> None:
    told: list[BdnError | None] = []
    asked = Asked(error)
    with pytest.raises(type(error)):
        await persistence(seconds, told).ask(asked)
    assert (asked.times > 1) is is_endured
    assert told == ([error] if is_endured else [])


ROOT = held_of({"config.json": whole(b"small"), "model.safetensors": whole(bytes(CHUNK_SIZE + 1))}).root
PATH = f"/manifests/{ROOT.digest}"


async def test_root__is_requested_with_the_grant_and_believed_when_it_has_its_name(
    service: Scripted, client: MirrorClient
) -> None:
    service.say(PATH, ROOT.content)
    assert await client.root(ROOT.digest, "grant") == (ROOT, DataPlane())
    assert service.asked[0][1]["authorization"] == "Bearer grant"


@pytest.mark.parametrize("content", [held_of({"evil.bin": whole(b"x")}).root.content, ROOT.content + b"\n", b""])
async def test_root__refuses_another_name(service: Scripted, client: MirrorClient, content: bytes) -> None:
    service.say(PATH, content)
    with pytest.raises(WrongDocumentError, match=f"{ROOT.digest} .*{client.address}.*{digest_of(content)}"):
        await client.root(ROOT.digest, None)


@pytest.mark.parametrize("content", [b"{}", b"no json", json.dumps(json.loads(ROOT.content), indent=1).encode()])
async def test_root__refuses_what_has_its_name_and_is_none(
    service: Scripted, client: MirrorClient, content: bytes
) -> None:
    service.say(f"/manifests/{digest_of(content)}", content)
    with pytest.raises(InternalError, match=f"manifest {digest_of(content)}"):
        await client.root(digest_of(content), None)
