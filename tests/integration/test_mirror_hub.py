"""``POST /hub``: a request of a hub client that an agent passes on, answered from the hub or from what the mirror holds."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.errors import NotFoundError
from bdn.wire.hub_schema import HubAnswer
from tests.doubles.faults import Fault, answer, cut, drop, flip_byte, hang, rate_limited, stall
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.support.content.noise import MIB, noise
from tests.support.mirror.secret_search import Seen, logging_like_a_program, text_of
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    Json,
    MirrorUnderTest,
    mirror_under_test,
    refusal,
    source,
    until,
)

pytest_plugins = ("tests.support.mirror.fixtures",)
OPERATOR = "the-operator-of-the-settings"
MODEL = "/api/models/org/model"
WEIGHTS = noise(MIB, 3)
FILES = {"config.json": b"{}", "a/b.txt": b"nested", "model.safetensors": WEIGHTS}
FORM = "application/x-www-form-urlencoded"
DEFAULTS = {"gateway_organisation": "default", "gateway_secret": "hub-token", "secrets_organisations": "default"}


def opened(folder: Path, **settings: Any) -> AbstractAsyncContextManager[MirrorUnderTest]:
    """A mirror whose gateways copy with the credentials of an organisation."""
    return mirror_under_test(folder, **{**DEFAULTS, **settings})


@pytest.fixture
async def gateway(upstreams: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    async with opened(tmp_path / "mirror") as mirror:
        yield mirror


@pytest.fixture
def model(hub: Hub) -> HubRepository:
    repository = hub.repo("org/model")
    repository.commit(FILES)
    return repository


async def ask(
    mirror: MirrorUnderTest, target: str, token: str | None = None, *, wait: float = LONGEST_SECONDS, **more: str | int
) -> HubAnswer:
    """What a client with this token gets."""
    body = {"method": "GET", "target": target, **more, **({"authorization": f"Bearer {token}"} if token else {})}
    reply = await mirror.http.post("/hub", json=body, params={"wait": wait})
    assert reply.status_code == 200, reply.text
    return HubAnswer.model_validate(reply.json())


async def direct(hub: Hub, target: str, token: str | None = None, method: str = "GET") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx2.AsyncClient(base_url=hub.url, headers=headers, trust_env=False) as client:
        return await client.request(method, target)


def file(path: str, revision: str = "main", repo_id: str = "org/model") -> str:
    return f"/{repo_id}/resolve/{quote(revision, safe='')}/{quote(path)}"


async def given(mirror: MirrorUnderTest, answered: HubAnswer) -> bytes:
    """The bytes that an agent finds where the answer says."""
    assert answered.content is not None, answered
    return (await mirror.tree(answered.content.manifest, answered.content.grant))[answered.content.path]


async def is_readable(mirror: MirrorUnderTest, answered: HubAnswer) -> bool:
    assert answered.content is not None, answered
    try:
        await mirror.files(answered.content.manifest, answered.content.grant)
    except NotFoundError:
        return False
    return True


def silence(hub: Hub, fault: Fault | None = None) -> None:
    hub.fail(fault or drop(), times=None)
    hub.log.clear()


# --- callers of the route ---


async def test_agents_alone_may_ask(upstreams: None, tmp_path: Path, model: HubRepository) -> None:
    body = {"method": "GET", "target": f"{MODEL}/revision/main"}
    async with opened(tmp_path / "mirror", auth="token", token=OPERATOR) as mirror:

        async def status(bearer: str | None) -> int:
            headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
            return (await mirror.http.post("/hub", json=body, headers=headers)).status_code

        async def made(role: str) -> str:
            wanted = {"name": role, "organisation": "acme", "role": role}
            headers = {"Authorization": f"Bearer {OPERATOR}"}
            return str((await mirror.http.post("/tokens", json=wanted, headers=headers)).json()["token"])

        assert await status(await made("agent")) == 200
        assert await status(await made("controller")) == 401
        assert await status(None) == 401
        assert await status("bdn_" + "x" * 43) == 401


async def test_a_mirror_without_an_organisation_for_gateways_names_the_setting(
    mirror: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    reply = await mirror.http.post("/hub", json={"method": "GET", "target": f"{MODEL}/revision/main"})

    assert refusal(reply) == (404, "NOT_FOUND")
    assert "BDN_GATEWAY_ORGANISATION" in reply.text
    assert hub.log.count() == 0


@pytest.mark.parametrize(
    "body",
    [
        {"method": "DELETE", "target": "/x"},
        {"method": "GET", "target": "x"},
        {"method": "GET", "target": "/a b"},
        {"method": "GET", "target": "/" + "x" * 8192},
        {"method": "GET", "target": "/x", "authorization": "hf_secret" * 500},
        {"method": "POST", "target": "/x", "body": "x" * (1024**2 + 1)},
    ],
)
async def test_a_request_that_no_client_sends_is_refused_without_its_text(gateway: MirrorUnderTest, body: Json) -> None:
    reply = await gateway.http.post("/hub", json=body)

    assert reply.status_code in (400, 413, 422)
    assert "hf_secret" not in reply.text


async def test_an_address_about_no_repository_is_404_and_whoami_is_the_hub_s(
    gateway: MirrorUnderTest, hub: Hub
) -> None:
    for target in ("/", "/api/agent-harnesses", "/api/telemetry/x", "/org/model/blob/main/x", "/api/models"):
        assert (await ask(gateway, target)).status == 404
    assert hub.log.count() == 0
    assert json.loads((await ask(gateway, "/api/whoami-v2", hub.token)).body)["name"] == "owner"
    assert (await ask(gateway, "/api/whoami-v2")).status == 401


# --- one request at the hub for many callers ---


async def test_callers_with_one_token_share_a_request_and_others_have_their_own(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    targets = (f"{MODEL}/revision/main", file("config.json"), f"{MODEL}/tree/main", f"{MODEL}/refs")
    one, other = hub.user("one"), hub.user("other")
    for target in targets:
        hub.log.clear()
        await ask(gateway, target, one)
        alone = hub.log.count()
        answers = await asyncio.gather(*[ask(gateway, target, one) for _ in range(20)])
        assert len({each.model_dump_json(exclude={"content": {"grant"}}) for each in answers}) == 1
        assert hub.log.count() == alone, target

    hub.log.clear()
    await asyncio.gather(*[ask(gateway, targets[0], token) for token in (other, None) for _ in range(10)])
    assert [each.headers.get("authorization") for each in hub.log.find()] in (
        [f"Bearer {other}", None],
        [None, f"Bearer {other}"],
    )


async def test_answers_carry_no_name_that_leads_to_xet(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    model.is_xet = True
    sha = model.commit({"model.safetensors": WEIGHTS})
    assert "xetHash" in (await direct(hub, f"{MODEL}/tree/{sha}")).text
    assert "X-Xet-Hash" in (await direct(hub, file("model.safetensors"))).headers
    paths = urlencode({"paths": "model.safetensors"})

    async def check() -> None:
        for target in (MODEL, f"{MODEL}/revision/main?blobs=true", f"{MODEL}/tree/{sha}?recursive=true"):
            answered = await ask(gateway, target)
            assert answered.status == 200
            assert "xet" not in answered.model_dump_json().lower(), target
        form = await ask(gateway, f"{MODEL}/paths-info/{sha}", method="POST", body=paths, content_type=FORM)
        assert [each["path"] for each in json.loads(form.body)] == ["model.safetensors"]
        assert "xet" not in form.model_dump_json().lower()
        for method in ("HEAD", "GET"):
            answered = await ask(gateway, file("model.safetensors"), method=method)
            assert (answered.status, "xet" in str(answered.headers).lower()) == (200, False)

    await check()  # as the hub answers
    await check()  # as the mirror lists it, which has copied the file


# --- listings ---


async def test_a_link_to_the_next_page_stays_inside_the_gateway(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    sha = model.commit({f"{number:04}.txt": b"x" for number in range(1500)})
    paths: list[str] = []
    target: str | None = f"{MODEL}/tree/{sha}?recursive=true"
    while target is not None:
        answered = await ask(gateway, target)
        paths += [each["path"] for each in json.loads(answered.body)]
        link = answered.headers.get("link")
        assert link is None or (link.startswith(f"<{MODEL}/tree/") and link.endswith('>; rel="next"'))
        target = link and link[1:].partition(">")[0]

    assert len(paths) == len(set(paths)) == 1500 + len(FILES) + 1


@pytest.mark.parametrize("elsewhere", ["https://evil.example", "//evil.example", "{hub}.evil.example", "{hub}@evil"])
async def test_a_link_to_another_host_is_dropped(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository, elsewhere: str
) -> None:
    sha = model.commit({f"{number:04}.txt": b"x" for number in range(1001)})
    hub.links_to = elsewhere.format(hub=hub.url)

    answered = await ask(gateway, f"{MODEL}/tree/{sha}?recursive=true")

    assert (answered.status, len(json.loads(answered.body))) == (200, 1000)
    assert "link" not in answered.headers
    assert "evil" not in answered.model_dump_json()


async def test_a_held_listing_of_many_entries_is_paged(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    sha = model.commit({f"{number // 700}/{number:04}.txt": b"%d" % (number % 3) for number in range(2100)})
    expected = [entry["path"] for entry in model.commits[sha].tree]
    await ask(gateway, file("config.json"))
    silence(hub)
    pages: list[list[str]] = []
    target: str | None = f"{MODEL}/tree/main?recursive=True&expand=False"
    while target is not None:
        answered = await ask(gateway, target, "hf_another")
        assert answered.headers["x-repo-commit"] == sha
        pages.append([each["path"] for each in json.loads(answered.body)])
        link = answered.headers.get("link")
        target = link and link[1:].partition(">")[0]

    assert [path for page in pages for path in page] == expected
    assert [len(page) for page in pages] == [1000, 1000, len(expected) - 2000]


async def test_a_held_listing_is_the_hub_s(gateway: MirrorUnderTest, hub: Hub, model: HubRepository) -> None:
    sha = model.commit({"empty": b"", "a/c/d.bin": b"x", "x/y.txt": b"y"})
    await ask(gateway, file("config.json"))
    no_oid = {"directory": {"oid": ""}}  # the mirror does not know git's names of folders

    def listed(text: str) -> list[Json]:
        return [{**each, **no_oid.get(each["type"], {})} for each in json.loads(text)]

    hub.log.clear()
    for part in ("", "?recursive=true", "/a", "/a?recursive=true", "/a/c", "/nowhere"):
        theirs, ours = await direct(hub, f"{MODEL}/tree/{sha}{part}"), await ask(gateway, f"{MODEL}/tree/{sha}{part}")
        assert (ours.status, ours.headers.get("x-error-code")) == (
            theirs.status_code,
            theirs.headers.get("x-error-code"),
        ), part
        assert ours.status == 404 or listed(ours.body) == listed(theirs.text), part
    body = urlencode([("paths", "a"), ("paths", "a/c/d.bin"), ("paths", "nowhere"), ("expand", "false")])
    ours = await ask(gateway, f"{MODEL}/paths-info/{sha}", method="POST", body=body, content_type=FORM)
    assert [(each["type"], each["path"]) for each in json.loads(ours.body)] == [
        ("directory", "a"),
        ("file", "a/c/d.bin"),
    ]
    as_json = json.dumps({"paths": ["a/c/d.bin"]})
    ours = await ask(gateway, f"{MODEL}/paths-info/{sha}", method="POST", body=as_json, content_type="application/json")
    assert [each["path"] for each in json.loads(ours.body)] == ["a/c/d.bin"]


# --- rules of the operator ---


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, {"org/model", "other/model", "other/data"}),
        ({"gateway_allow": "org/*, other/data"}, {"org/model", "other/data"}),
        ({"gateway_deny": "org/*"}, {"other/model", "other/data"}),
        ({"gateway_allow": "*/model", "gateway_deny": "other/*"}, {"org/model"}),
        ({"gateway_allow": ""}, set()),
    ],
)
async def test_repositories_are_allowed_and_denied_by_globs(
    upstreams: None, tmp_path: Path, hub: Hub, settings: Json, allowed: set[str]
) -> None:
    names = {"org/model", "other/model", "other/data"}
    for name in names:
        hub.repo(name).commit(FILES)
    async with opened(tmp_path / "mirror", **settings) as mirror:
        for name in names:
            hub.log.clear()
            for target in (f"/api/models/{name}", file("config.json", repo_id=name)):
                answered = await ask(mirror, target)
                assert answered.status == (200 if name in allowed else 403), (name, target)
                assert name in allowed or name in answered.headers["x-error-message"]
            assert name in allowed or hub.log.count() == 0


async def test_a_file_above_the_limit_is_refused_with_its_reason(
    upstreams: None, tmp_path: Path, model: HubRepository
) -> None:
    async with opened(tmp_path / "mirror", gateway_limit=len(WEIGHTS) - 1) as mirror:
        answered = await ask(mirror, file("model.safetensors"))
        assert (answered.status, answered.content) == (403, None)
        assert "BDN_GATEWAY_LIMIT" in answered.headers["x-error-message"]
        assert (await ask(mirror, file("config.json"))).status == 200
        assert (await ask(mirror, file("model.safetensors"), method="HEAD")).status == 200


# --- files ---


async def test_a_file_is_copied_once_and_then_given(gateway: MirrorUnderTest, hub: Hub, model: HubRepository) -> None:
    (sha,) = model.commits
    answers = await asyncio.gather(
        *[ask(gateway, file("model.safetensors"), token) for token in (None, hub.stranger_token) for _ in range(10)]
    )
    for answered in answers:
        assert (answered.status, answered.is_pending) == (200, False)
        assert answered.headers["x-repo-commit"] == sha
        assert answered.headers["etag"] == model.commits[sha].files["model.safetensors"].etag
        assert answered.headers["content-length"] == str(len(WEIGHTS))
        assert answered.content is not None
        assert (answered.content.path, answered.content.size) == ("model.safetensors", len(WEIGHTS))
    assert await given(gateway, answers[0]) == WEIGHTS

    assert hub.log.bytes_served(origin="cdn") == len(WEIGHTS)
    assert gateway.count("mirrors") == 1


async def test_a_head_copies_nothing(gateway: MirrorUnderTest, hub: Hub, model: HubRepository) -> None:
    (commit,) = model.commits.values()
    for path, content in FILES.items():
        answered = await ask(gateway, file(path), method="HEAD")
        assert (answered.status, answered.content) == (200, None)
        assert answered.headers["etag"] == commit.files[path].etag
        assert answered.headers["content-length"] == str(len(content))
    assert gateway.count("mirrors") == 0


async def test_a_file_or_revision_that_is_not_there_is_the_hub_s_404(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    for target in (file("nowhere"), file("config.json", "nowhere"), file("config.json", repo_id="org/nowhere")):
        for token in (None, hub.stranger_token):
            theirs, ours = await direct(hub, target, token), await ask(gateway, target, token)
            assert (ours.status, ours.headers["x-error-code"]) == (theirs.status_code, theirs.headers["x-error-code"])
            assert ours.headers.get("x-repo-commit") == theirs.headers.get("x-repo-commit")
    assert gateway.count("mirrors") == 0


async def test_files_asked_one_after_the_other_end_as_one_manifest(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    files = {f"{number}.bin": noise(1000 + number, number) for number in range(6)}
    model.commit(files)
    answers = [await ask(gateway, file(path)) for path in files]

    readable = [await is_readable(gateway, answered) for answered in answers]
    assert readable == [False] * 4 + [True] * 2
    last = answers[-1].content
    assert last is not None
    assert await gateway.tree(last.manifest, last.grant) == files
    assert hub.log.bytes_served(origin="cdn") == sum(map(len, files.values()))  # each byte once
    again = await ask(gateway, file("0.bin"))
    assert again.content is not None
    assert again.content.manifest == last.manifest


async def test_files_asked_while_a_copy_runs_are_in_the_next(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.hub.copies._NEXT_SECONDS", LONGEST_SECONDS)
    model.commit({"late.bin": b"late", "later.bin": b"later"})
    hub.fail(stall(), origin="cdn")
    first = asyncio.create_task(ask(gateway, file("model.safetensors")))
    await until(lambda: hub.log.count(origin="cdn"))
    for path in ("late.bin", "later.bin", "config.json", "late.bin"):
        assert (await ask(gateway, file(path), wait=0)).is_pending
    assert gateway.count("mirrors") == 1
    waiting = asyncio.create_task(ask(gateway, file("a/b.txt")))
    assert (await ask(gateway, file("a/b.txt"), wait=0)).is_pending
    hub.release_stalled()
    assert await given(gateway, await first) == WEIGHTS
    assert await given(gateway, await waiting) == b"nested"
    answers = [await ask(gateway, file(path)) for path in ("late.bin", "later.bin", "config.json")]

    assert [await given(gateway, answered) for answered in answers] == [b"late", b"later", b"{}"]
    assert len({answered.content.manifest for answered in answers if answered.content}) == 1
    assert gateway.count("mirrors") == 2


async def test_a_copy_that_takes_long_holds_up_no_other_file(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.hub.copies._NEXT_SECONDS", 0.01)
    hub.fail(stall(), origin="cdn")
    first = asyncio.create_task(ask(gateway, file("model.safetensors")))
    await until(lambda: hub.log.count(origin="cdn"))
    assert await given(gateway, await ask(gateway, file("config.json"))) == b"{}"
    assert (await ask(gateway, file("model.safetensors"), wait=0)).is_pending
    hub.release_stalled()
    assert await given(gateway, await first) == WEIGHTS
    together = [await ask(gateway, file(path)) for path in ("a/b.txt", "config.json", "model.safetensors")]
    assert len({answered.content.manifest for answered in together if answered.content}) == 1
    assert hub.log.count(origin="cdn") == 1


@pytest.mark.parametrize("private", [False, True])
async def test_a_file_that_is_being_copied_has_a_beginning_for_callers_that_may_read_it(
    gateway: MirrorUnderTest, hub: Hub, private: bool
) -> None:
    large, places = noise(2 * CHUNK_SIZE + 3, 5), (0, CHUNK_SIZE, 2 * CHUNK_SIZE)
    hub.repo("org/new", private=private).commit({"large": large})
    hub.fail(stall(), origin="cdn", skip=1)
    target, token = file("large", repo_id="org/new"), hub.token
    begun: dict[int, bytes] = {}
    async with asyncio.timeout(LONGEST_SECONDS):
        while not begun:
            for at in places:
                answered = await ask(gateway, target, token, wait=0.1, beginning_at=at)
                assert answered.is_pending
                assert answered.headers["content-length"] == str(len(large))
                begun |= {at: answered.beginning} if answered.beginning else {}
    for at, beginning in begun.items():
        assert beginning == large[at : at + 65_536]
    refused = await ask(gateway, target, wait=0, beginning_at=min(begun))
    assert bool(refused.beginning) is not private
    assert not (await ask(gateway, target, token, wait=0, beginning_at=3 * CHUNK_SIZE)).beginning
    hub.release_stalled()
    whole = await ask(gateway, target, token, beginning_at=CHUNK_SIZE - 1)
    assert (whole.beginning, await given(gateway, whole)) == (large[CHUNK_SIZE - 1 : CHUNK_SIZE], large)


async def test_a_copy_that_fails_is_said_with_its_reason_and_not_repeated_within_its_pause(
    upstreams: None, tmp_path: Path, hub: Hub
) -> None:
    hub.repo("org/private", private=True).commit(FILES)
    target = file("model.safetensors", repo_id="org/private")
    async with opened(tmp_path / "mirror", gateway_secret=None) as mirror:  # its organisation may not read it
        first = await ask(mirror, target, hub.token)
        begun = mirror.count("mirrors")
        again = [await ask(mirror, target, hub.token) for _ in range(3)]

        assert first.status == 422  # never 401, which clients take for "no such repository"
        assert "org/private" in first.headers["x-error-message"]
        assert {one.model_dump_json() for one in again} == {first.model_dump_json()}
        assert mirror.count("mirrors") == begun


async def test_a_copy_that_failed_is_tried_again_after_its_pause(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bdn.mirror.hub.copies._FAILED_SECONDS", 0.0)
    hub.fail(answer(403), origin="cdn", times=None)
    await ask(gateway, file("model.safetensors"))
    hub.script.clear()

    assert await given(gateway, await ask(gateway, file("model.safetensors"))) == WEIGHTS


async def waiting_together(mirror: MirrorUnderTest, hub: Hub, *paths: str) -> None:
    """These files are in the next copy, which begins now."""
    hub.fail(stall(), origin="cdn")
    first = asyncio.create_task(ask(mirror, file("model.safetensors")))
    await until(lambda: hub.log.count(origin="cdn"))
    for path in paths:
        assert (await ask(mirror, file(path), wait=0)).is_pending
    hub.release_stalled()
    assert await given(mirror, await first) == WEIGHTS


async def test_one_bad_file_does_not_keep_its_neighbours_from_being_copied(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    sha = model.commit({"bad.bin": noise(MIB, 4), "good.bin": b"good"})
    hub.fail(flip_byte(), model.commits[sha].files["bad.bin"].sha256, times=None, origin="cdn")
    await waiting_together(gateway, hub, "good.bin", "bad.bin")

    bad = await ask(gateway, file("bad.bin"))
    assert (bad.status, bad.content) == (502, None)
    assert "bad.bin" in bad.headers["x-error-message"]
    assert await given(gateway, await ask(gateway, file("good.bin"))) == b"good"


async def test_one_bad_file_is_no_failure_of_its_neighbours(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    sha = model.commit({"bad.bin": noise(MIB, 4), "good.bin": b"good"})
    hub.fail(flip_byte(), model.commits[sha].files["bad.bin"].sha256, times=None, origin="cdn")
    hub.fail(stall(), origin="cdn")
    first = asyncio.create_task(ask(gateway, file("model.safetensors")))
    await until(lambda: hub.log.count(origin="cdn"))
    waiting = asyncio.create_task(ask(gateway, file("good.bin")))
    for path in ("bad.bin", "good.bin", "bad.bin"):
        assert (await ask(gateway, file(path), wait=0)).is_pending
    hub.release_stalled()
    await first

    good = await waiting

    assert (good.status, good.headers.get("x-error-message")) == (200, None)


async def test_a_mirror_that_ends_does_not_wait_for_copies_that_clients_began(
    upstreams: None, hub: Hub, model: HubRepository, tmp_path: Path
) -> None:
    hub.fail(stall(), origin="cdn", times=None)
    async with asyncio.timeout(LONGEST_SECONDS), opened(tmp_path / "mirror") as mirror:
        assert (await ask(mirror, file("model.safetensors"), wait=0)).is_pending
        await until(lambda: hub.log.count(origin="cdn"))


async def test_a_file_that_fails_by_itself_is_copied_once(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    hub.fail(answer(403), origin="cdn", times=None)
    assert (await ask(gateway, file("model.safetensors"))).status >= 400
    assert gateway.count("mirrors") == 1


async def test_a_file_is_given_though_the_next_copy_has_begun(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    sha = model.commit({"next.bin": b"next"})
    hub.fail(cut(), model.commits[sha].files["next.bin"].sha256, times=None, origin="cdn")
    began = asyncio.create_task(ask(gateway, file("config.json")))
    await until(lambda: gateway.count("mirrors"))
    assert (await ask(gateway, file("next.bin"), wait=0)).is_pending
    await until(lambda: hub.log.count(origin="cdn"))
    try:
        await until(began.done)
    finally:
        hub.release_stalled()
        assert await given(gateway, await began) == b"{}"


async def test_a_branch_that_moves_before_the_copy_gives_the_file_of_its_commit(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    (old,) = model.commits
    await ask(gateway, f"{MODEL}/revision/main")
    assert (await ask(gateway, file("config.json"), method="HEAD")).headers["x-repo-commit"] == old
    new = model.commit({"config.json": b"[1]", "model.safetensors": None})

    for revision in ("main", old):
        answered = await ask(gateway, file("config.json", revision))
        assert answered.headers["x-repo-commit"] == old
        assert await given(gateway, answered) == b"{}"
    answered = await ask(gateway, file("config.json", new))
    assert await given(gateway, answered) == b"[1]"
    assert await given(gateway, await ask(gateway, file("model.safetensors", old))) == WEIGHTS


async def test_names_with_signs_of_patterns_and_empty_files(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    awkward = {
        "[x].bin": b"brackets",
        "x.bin": b"not the one in brackets",
        "*.bin": b"star",
        "?.bin": b"question",
        "a b/[*]?.txt": b"all of them",
        "{a,b}.txt": b"braces",
        "!not.txt": b"mark",
        "100%.txt": b"percent",
        "ünï/日本.json": b"unicode",
        "empty.txt": b"",
        "a/empty.bin": b"",
    }
    model.commit(awkward)
    answers = {path: await ask(gateway, file(path)) for path in awkward}
    assert {path: answered.status for path, answered in answers.items()} == dict.fromkeys(awkward, 200)
    last = list(answers.values())[-1].content
    assert last is not None
    assert await gateway.tree(last.manifest, last.grant) == awkward  # and no other


async def test_a_repository_that_was_renamed_is_found_by_its_old_name(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    hub.moved["gpt2"] = "org/model"
    for target in (
        "/api/models/gpt2",
        "/api/models/gpt2/revision/main",
        "/api/models/gpt2/tree/main?recursive=true",
        file("config.json", repo_id="gpt2"),
    ):
        answered = await ask(gateway, target)
        assert answered.status == 307, target
        assert answered.headers["location"] == target.replace("gpt2", "org/model"), target
        assert (await ask(gateway, answered.headers["location"])).status == 200


async def test_a_redirect_to_another_host_is_not_passed_on(gateway: MirrorUnderTest, hub: Hub) -> None:
    for location in (
        "https://evil.example/api/models/a/b",
        "//evil.example/api/models/a/b",
        f"{hub.url}.evil.example/x",
    ):
        hub.fail(answer(307, {"Location": location}))
        answered = await ask(gateway, "/api/models/a/b", hub.user("one"))
        assert "location" not in answered.headers


@pytest.mark.parametrize("kind", ["dataset", "space", "kernel"])
async def test_datasets_spaces_and_kernels(gateway: MirrorUnderTest, hub: Hub, kind: Any) -> None:
    sha = hub.repo("org/one", kind=kind).commit(FILES)
    answered = await ask(gateway, f"/{kind}s{file('model.safetensors', repo_id='org/one')}")
    assert answered.headers["x-repo-commit"] == sha
    assert await given(gateway, answered) == WEIGHTS
    silence(hub)
    for target in (f"/{kind}s{file('model.safetensors', repo_id='org/one')}", f"/api/{kind}s/org/one"):
        assert (await ask(gateway, target, "hf_another")).headers["x-repo-commit"] == sha


# --- access ---


@pytest.mark.parametrize("protection", [{"private": True}, {"gated": True}, {"private": True, "gated": True}])
async def test_callers_of_protected_repositories_get_what_the_hub_gives_them(
    gateway: MirrorUnderTest, hub: Hub, protection: Json
) -> None:
    reader = hub.user("reader")
    repository = hub.repo("org/model", **protection)
    sha = repository.commit(FILES)
    repository.allow(reader)
    callers = {"owner": hub.token, "reader": reader, "stranger": hub.stranger_token, "anonymous": None}
    targets = (MODEL, f"{MODEL}/tree/main", f"{MODEL}/auth-check", file("config.json"), file("config.json", sha))

    async def check() -> None:
        for name, token in callers.items():
            for target in targets:
                theirs, ours = await direct(hub, target, token), await ask(gateway, target, token)
                said = (theirs.status_code, theirs.headers.get("x-error-code"))
                assert (ours.status, ours.headers.get("x-error-code")) == said, (name, target)
                is_file = "/resolve/" in target and ours.status == 200
                assert (ours.content is not None) == is_file, (name, target)
                assert not is_file or name in ("owner", "reader")

    await check()
    await check()  # now the mirror holds the file


async def test_what_a_caller_may_read_says_nothing_of_others(gateway: MirrorUnderTest, hub: Hub) -> None:
    reader = hub.user("reader")
    repository = hub.repo("org/model", private=True)
    repository.commit(FILES)
    repository.allow(reader)
    assert (await ask(gateway, file("config.json"), reader)).content is not None
    hub.log.clear()
    assert (await ask(gateway, file("config.json"), hub.stranger_token)).status == 404
    assert hub.log.count() == 1  # of the stranger: the reader's answer is not his


# --- the hub is silent ---


@pytest.mark.parametrize(
    ("fault", "secret", "is_restarted"),
    [
        (drop(), "hub-token", False),
        (drop(), "hub-token", True),
        (drop(), None, True),
        (answer(503), None, False),
        (answer(500), "hub-token", False),
    ],
    ids=["dropped", "dropped after a restart", "dropped, copied without a token", "503", "500"],
)
async def test_public_repositories_are_as_they_were_last_and_nothing_else_is(
    upstreams: None,
    tmp_path: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    secret: str | None,
    is_restarted: bool,
) -> None:
    monkeypatch.setattr("bdn.mirror.hub.gateway._SILENT_SECONDS", 0.0)  # so that each answer is tried
    repositories = {
        name: hub.repo(f"org/{name}", private=name == "private", gated=name == "gated")
        for name in ("public", "private", "gated")
    }
    shas = {name: repository.commit(FILES) for name, repository in repositories.items()}
    repositories["public"].tag("v1")
    public = "/api/models/org/public"
    folder, settings = tmp_path / "mirror", {"gateway_secret": secret}
    callers = (hub.token, hub.stranger_token, None)

    async def hold(mirror: MirrorUnderTest) -> None:
        for name in repositories if secret else ("public",):
            assert (await ask(mirror, file("config.json", repo_id=f"org/{name}"), hub.token)).content is not None

    async def check(mirror: MirrorUnderTest, tokens: tuple[str | None, ...]) -> None:
        silence(hub, fault)
        for token in tokens:
            for revision in ("main", shas["public"]):
                head = await ask(mirror, file("model.safetensors", revision, "org/public"), token, method="HEAD")
                got = await ask(mirror, file("config.json", revision, "org/public"), token)
                assert await given(mirror, got) == b"{}"
                described = await ask(mirror, f"{public}/revision/{revision}", token)
                assert (json.loads(described.body)["sha"], json.loads(described.body)["private"]) == (
                    shas["public"],
                    False,
                )
                assert {one["rfilename"] for one in json.loads(described.body)["siblings"]} == FILES.keys()
                tree = await ask(mirror, f"{public}/tree/{revision}?recursive=true", token)
                missing = await ask(mirror, file("nowhere", revision, "org/public"), token)
                assert (missing.status, missing.headers["x-error-code"]) == (404, "EntryNotFound")
                for answered in (head, got, described, tree, missing):
                    assert answered.headers["x-repo-commit"] == shas["public"]
                    assert answered.headers["x-hf-warning"].startswith("bdn; ")
                not_copied = await ask(mirror, file("model.safetensors", revision, "org/public"), token)
                assert (not_copied.status, not_copied.content) == (504, None)
            refs = json.loads((await ask(mirror, f"{public}/refs", token)).body)
            assert refs["branches"][0]["targetCommit"] == shas["public"]
            unknown = [file("config.json", "v1", "org/public"), file("x", repo_id="org/unknown"), "/api/whoami-v2"]
            unknown += [f"{public}/commits/main", f"{public}/discussions", "/api/models/org/unknown"]
            for name in ("private", "gated"):
                unknown += [f"/api/models/org/{name}", f"/api/models/org/{name}/tree/{shas[name]}"]
                unknown += [file("config.json", revision, f"org/{name}") for revision in ("main", shas[name])]
            for target in unknown:
                answered = await ask(mirror, target, token)
                assert (answered.status, answered.content) == (504, None), (target, token)
                assert FILES["model.safetensors"].hex() not in answered.body

    async with opened(folder, **settings) as mirror:
        await hold(mirror)
        if not is_restarted:
            await check(mirror, (*callers[1:], "hf_unheard_of"))  # the owner's answers are remembered for a while
    if is_restarted:
        async with opened(folder, **settings) as mirror:
            await check(mirror, callers)
            hub.script.clear()  # the hub is back
            assert await given(mirror, await ask(mirror, file("model.safetensors", repo_id="org/public"))) == WEIGHTS


async def test_nothing_is_written_at_the_hub(gateway: MirrorUnderTest, hub: Hub, model: HubRepository) -> None:
    for path in ("/discussions", "/refs", "/commits/main", "/revision/main", "/auth-check", "/tree/main"):
        await ask(gateway, f"{MODEL}{path}", hub.token, method="POST", body="{}", content_type="application/json")
    assert hub.log.find(method="POST") == []


async def test_dots_in_an_address_do_not_lead_to_another_repository(
    upstreams: None, tmp_path: Path, hub: Hub, model: HubRepository
) -> None:
    hub.repo("denied/model").commit({"secret.json": b"{}"})
    async with opened(tmp_path / "mirror", gateway_deny="denied/*") as mirror:
        for up in ("../../../..", "%2E%2E/%2E%2E/%2E%2E/%2E%2E"):
            answered = await ask(mirror, f"{MODEL}/tree/main/{up}/denied/model/tree/main")
            assert "secret.json" not in answered.body
    assert hub.log.count("denied") == 0


async def test_a_manifest_that_the_organisation_mirrored_itself_is_not_given_up(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    model.commit({"1.bin": b"1", "2.bin": b"2", "3.bin": b"3"})
    first = await ask(gateway, file("1.bin"))
    own = await gateway.ready({**source("hf://org/model"), "allow_patterns": ["1.bin"]})
    assert first.content is not None
    assert own["sources"][0]["manifest"] == first.content.manifest
    for path in ("2.bin", "3.bin"):
        await ask(gateway, file(path))
    assert await gateway.tree(own["sources"][0]["manifest"], own["grant"]) == {"1.bin": b"1"}


async def test_a_manifest_that_another_commit_has_too_is_not_given_up(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    (old,) = model.commits
    assert await given(gateway, await ask(gateway, file("config.json", old))) == b"{}"
    new = model.commit({"1.bin": b"1", "2.bin": b"2"})
    for path in ("config.json", "1.bin", "2.bin"):
        await ask(gateway, file(path, new))
    silence(hub)
    assert (await ask(gateway, file("config.json", old), "hf_another")).status == 200


async def test_a_hub_that_limits_requests_is_asked_again(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    hub.fail(rate_limited(7))
    limited = await ask(gateway, f"{MODEL}/revision/main")
    assert limited.status == 429
    assert (await ask(gateway, f"{MODEL}/revision/main")).status == 200
    assert limited.headers["retry-after"] == "7"


async def test_a_token_for_xet_is_the_hub_s(gateway: MirrorUnderTest, hub: Hub, model: HubRepository) -> None:
    model.is_xet = True
    sha = model.commit({"model.safetensors": WEIGHTS})
    theirs, ours = (
        (await direct(hub, f"{MODEL}/xet-read-token/{sha}")),
        await ask(gateway, f"{MODEL}/xet-read-token/{sha}"),
    )
    assert ours.status == 200
    for name in ("x-xet-cas-url", "x-xet-access-token"):
        assert ours.headers[name] == theirs.headers[name]


async def test_a_silent_hub_is_asked_once_for_many_callers(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(gateway, file("config.json"))
    silence(hub, hang())
    for number in range(10):
        assert (await ask(gateway, file("config.json"), hub.user(f"caller{number}"))).status == 200
        assert (await ask(gateway, f"/api/models/org/unknown{number}")).status == 504
    assert hub.log.count() == 1

    hub.script.clear()
    hub.release_stalled()
    monkeypatch.setattr("bdn.mirror.hub.gateway.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60))
    assert (await ask(gateway, f"{MODEL}/discussions")).status == 200


async def test_an_address_that_fails_at_the_hub_does_not_silence_the_others(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    hub.fail(answer(500), "/discussions", times=None)
    assert (await ask(gateway, f"{MODEL}/discussions")).status >= 500
    described = await ask(gateway, f"{MODEL}/revision/main")
    assert (described.status, described.headers.get("x-hf-warning")) == (200, None)


async def test_a_branch_is_remembered_though_clients_describe_its_commit(
    gateway: MirrorUnderTest, hub: Hub, model: HubRepository
) -> None:
    (sha,) = model.commits
    for target in (f"{MODEL}/revision/main", f"{MODEL}/revision/{sha}", file("config.json", sha)):
        await ask(gateway, target)
    silence(hub)

    answered = await ask(gateway, file("config.json"), "hf_another")

    assert (answered.status, answered.headers.get("x-repo-commit")) == (200, sha)


# --- tokens of callers ---


async def test_a_token_that_is_not_ascii_is_refused(gateway: MirrorUnderTest, model: HubRepository) -> None:
    reply = await gateway.http.post(
        "/hub", json={"method": "GET", "target": f"{MODEL}/revision/main", "authorization": "Bearer hf_ünïcode"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "INVALID_REQUEST")
    assert "hf_" not in reply.text


async def test_a_caller_s_token_is_kept_nowhere(upstreams: None, tmp_path: Path, hub: Hub) -> None:
    reader = hub.user("reader")
    repository = hub.repo("org/private", private=True, gated=True)
    repository.commit(FILES)
    repository.allow(reader)
    tokens = [reader, hub.stranger_token, "hf_of_nobody_at_all", "hf_with some ~ signs"]
    seen, folder = Seen(), tmp_path / "mirror"
    with logging_like_a_program(seen):
        async with opened(folder) as mirror:

            async def check() -> None:
                for token in tokens:
                    for path in ("", "/tree/main", "/auth-check", "/discussions"):
                        await answered(f"/api/models/org/private{path}", token)
                    await answered(file("model.safetensors", repo_id="org/private"), token)
                    await answered("/api/whoami-v2", token)

            async def answered(target: str, token: str) -> None:
                body = {"method": "GET", "target": target, "authorization": f"Bearer {token}"}
                reply = await mirror.http.post("/hub", json=body, params={"wait": LONGEST_SECONDS})
                await seen.note(reply)

            await check()
            hub.fail(answer(418, body=b"what is this?"), times=None)
            hub.fail(flip_byte(), times=None, origin="cdn")
            await check()
            silence(hub)
            await check()
            seen.rows = repr(mirror.rows())
        seen.files = text_of(folder)
    assert "org/private" in seen.rows
    assert seen.records
    assert [found for found in seen.leaks(tokens) if found.startswith("secret")] == []
    assert [token for token in tokens if token in seen.libraries.getvalue()] == []
