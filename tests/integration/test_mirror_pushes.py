"""What a job writes goes in chunk by chunk, and is a checkpoint at once and whole: a READY mirror by the name ``bt://…``."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import inspect

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.source.uri import CheckpointUri
from bdn.mirror.db import checkpoints
from bdn.mirror.jobs.pushes import GIVEN_UP_SECONDS
from tests.doubles.content import GeneratedContent
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.mirror.job import STEP, Job, chunks_of
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, refusal, source, until

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.usefixtures("upstreams")
LARGE = GeneratedContent(2 * CHUNK_SIZE + 5)
TREE = {
    "model.safetensors": noise(9 * MIB + 1, 2),
    "config.json": b"{}",
    "a b/ünïcödé.txt": b"x",
    "nothing": b"",
    ".metadata": b"dot",
}


@pytest.fixture
async def job(mirror_with_data_plane: MirrorUnderTest) -> AsyncIterator[Job]:
    job = Job(mirror_with_data_plane)
    async with job.plane:
        yield job


async def test_a_push_becomes_a_mirror_that_is_read_like_any_other(job: Job) -> None:
    details: Json = {"checkpoint_type": "full", "created_at": "2026-11-25T10:00:00Z", "skipped": ["a link"]}
    done = await job.push(TREE, **details)
    (part,) = done["sources"]
    size = sum(map(len, TREE.values()))
    assert (done["status"], part["source"], part["resolved_revision"]) == ("READY", STEP, "job1/checkpoint-100")
    assert (done["files_total"], done["bytes_total"], done["bytes_transferred"]) == (len(TREE), size, size)
    assert await job.mirror.tree(part["manifest"], done["grant"]) == TREE
    assert await job.mirror.metric("bdn_mirror_pushed_bytes_total") == size
    (checkpoint,) = await job.checkpoints()
    assert checkpoint["source"] == STEP
    assert checkpoint["manifest"] == part["manifest"]
    assert (checkpoint["checkpoint_type"], checkpoint["skipped"]) == ("full", ["a link"])
    assert (checkpoint["created_at"], checkpoint["size_bytes"]) == ("2026-11-25T10:00:00Z", size)


async def test_nothing_of_a_push_is_seen_before_its_commit(job: Job) -> None:
    push = await job.begin()
    await job.send(push, TREE)
    assert await job.checkpoints() == []
    assert job.mirror.published() == {"manifests": []}
    seen = await job.mirror.get(f"/mirror/{push}")
    assert (seen["status"], seen["grant"], seen["bytes_transferred"]) == ("SYNCING", None, sum(map(len, TREE.values())))
    assert (await job.mirror.failed(source(STEP)))["code"] == "SOURCE_NOT_FOUND"


async def test_a_commit_said_again_is_the_same_answer(job: Job) -> None:
    push = await job.begin()
    await job.send(push, TREE)
    first, second = await job.commit(push, TREE), await job.commit(push, TREE)
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["sources"] == second.json()["sources"]
    assert refusal(await job.commit(push, {"other": b""})) == (404, "NOT_FOUND")


async def test_a_commit_names_chunks_that_were_not_sent(job: Job) -> None:
    push = await job.begin()
    await job.put(push, *next(iter(chunks_of(TREE).items())))
    answer = await job.commit(push, TREE)
    assert refusal(answer) == (409, "CHUNKS_MISSING")
    assert answer.json()["error"]["details"]["count"] == len(chunks_of(TREE)) - 1
    await job.send(push, TREE)
    assert (await job.commit(push, TREE)).status_code == 200


def name_of(content: bytes) -> str:
    return str(digest_of(content))


@pytest.mark.parametrize("files", [
    [],
    [{"path": "../x", "size": 0}],
    [{"path": "x", "size": 0}, {"path": "x", "size": 0}],
    [{"path": "x", "size": 0}, {"path": "x/y", "size": 0}],
    [{"path": "x", "size": CHUNK_SIZE, "chunks": []}],
    [{"path": "x", "size": 0, "chunks": [name_of(b"ab")]}],
    [{"path": "x", "size": 2, "chunks": [name_of(b"ab")]}],
    [{"path": "x", "size": CHUNK_SIZE, "chunks": [name_of(b"ab")]}],
    [{"path": "x", "size": CHUNK_SIZE, "digest": name_of(b"ab"), "slab": name_of(b"ab"), "offset": 0}],
])  # fmt: skip
async def test_a_commit_that_is_no_tree_of_files_is_refused(job: Job, files: list[Json]) -> None:
    push = await job.begin()
    await job.send(push, {"config.json": b"ab"})
    assert refusal(await job.ask("POST", f"/pushes/{push}/commit", files=files)) == (422, "INVALID_REQUEST")


@pytest.mark.parametrize("digest", [b"a", b"x"], ids=["its first byte alone", "another one"])
async def test_a_small_file_that_is_not_what_its_slab_holds_is_refused(job: Job, digest: bytes) -> None:
    push = await job.begin()
    await job.send(push, {"x": b"ab"})
    size = 1 if digest == b"a" else 2
    entry = {"path": "x", "size": size, "digest": name_of(digest), "slab": name_of(b"ab"), "offset": 0}
    assert refusal(await job.ask("POST", f"/pushes/{push}/commit", files=[entry])) == (422, "INVALID_REQUEST")


async def test_slab_that_the_store_lost__is_sent_again(job: Job) -> None:
    push = await job.begin()
    await job.send(push, TREE)
    (slab,) = [name for name, chunk in chunks_of(TREE).items() if len(chunk) == len(b"dotx{}")]
    with job.mirror.behind.chunk(Digest.parse(slab)) as file:
        file.write_bytes(b"xotx{}")
    assert refusal(await job.commit(push, TREE)) == (409, "CHUNKS_MISSING")
    assert await job.send(push, TREE) == len(b"dotx{}")
    done = (await job.commit(push, TREE)).json()
    assert await job.mirror.tree(done["sources"][0]["manifest"]) == TREE


async def test_commits_of_one_push_at_once__do_not_take_chunks_from_each_other(job: Job) -> None:
    """Each refers to what it names: the one that comes first is published whole, and the other finds that the push has ended."""
    trees = [{"a": b"1", "model": LARGE.read(0, CHUNK_SIZE)}, {"a": b"22", "model": LARGE.read(0, CHUNK_SIZE + 1)}]
    push = await job.begin()
    for tree in trees:
        await job.send(push, tree)
    answers = await asyncio.gather(*[job.commit(push, tree) for tree in trees])
    assert sorted(answer.status_code for answer in answers) == [200, 404]
    await job.mirror.collect(grace_seconds=0)
    done = next(number for number, answer in enumerate(answers) if answer.status_code == 200)
    assert await job.mirror.tree(answers[done].json()["sources"][0]["manifest"]) == trees[done]


async def test_chunks_of_another_size_do_not_make_up_a_file(job: Job) -> None:
    """A file's name is made of chunk names and its size: nobody may give a chunk another length by naming a wrong size."""
    push = await job.begin()
    await job.send(push, TREE)
    model = TREE["model.safetensors"]
    whole, short = name_of(model[:CHUNK_SIZE]), name_of(model[CHUNK_SIZE:])
    for size, chunks in [(2**20, [short]), (CHUNK_SIZE + 2, [short, whole]), (CHUNK_SIZE + 3, [whole, short])]:
        answer = await job.ask("POST", f"/pushes/{push}/commit", files=[{"path": "x", "size": size, "chunks": chunks}])
        assert refusal(answer) == (422, "INVALID_REQUEST"), answer.text


async def test_a_second_push_sends_what_changed(job: Job) -> None:
    await job.push(TREE)
    changed = TREE | {"model.safetensors": TREE["model.safetensors"][:-1] + b"!"}
    push = await job.begin("bt://llama@job1/checkpoint-200")
    assert await job.send(push, changed) == MIB + 1
    done = (await job.commit(push, changed)).json()
    assert done["bytes_transferred"] == MIB + 1
    assert done["bytes_reused"] == sum(map(len, TREE.values())) - MIB - 1


async def test_what_a_push_that_ended_had_sent_the_next_one_finds(job: Job) -> None:
    push = await job.begin()
    await job.send(push, TREE)
    assert (await job.ask("DELETE", f"/pushes/{push}")).json()["status"] == "CANCELED"
    assert refusal(await job.put(push, *next(iter(chunks_of(TREE).items())))) == (404, "NOT_FOUND")
    again = await job.begin()
    assert again != push
    assert await job.send(again, TREE) == 0
    assert (await job.commit(again, TREE)).status_code == 200


async def test_whoever_begins_the_same_push_again_goes_on_with_it(job: Job) -> None:
    pushes = {await job.begin() for _ in range(3)}
    assert len(pushes) == 1
    assert await job.begin("bt://llama@job1/checkpoint-100#rank-1") not in pushes


@pytest.mark.parametrize(
    "uri",
    ["bt://llama", "bt://llama@job1", "bt://llama/checkpoint-100", "hf://org/model", "bt://llama@job1/.archive"],
)
async def test_a_push_names_one_checkpoint_of_one_job(job: Job, uri: str) -> None:
    assert refusal(await job.ask("POST", "/pushes", source=uri)) == (422, "INVALID_SOURCE")


async def test_what_is_mirrored_from_a_checkpoint_moves_nothing(job: Job) -> None:
    manifest = (await job.push(TREE))["sources"][0]["manifest"]
    for uri in ("bt://llama", "bt://llama@latest/checkpoint-100", "bt://llama@job1", STEP):
        done = await job.mirror.ready(source(uri))
        assert done["sources"][0]["manifest"] == manifest
        assert (done["bytes_transferred"], done["bytes_reused"]) == (0, done["bytes_total"])
    selected = await job.mirror.ready(source("bt://llama", allow_patterns=["*.json"]))
    assert await job.mirror.tree(selected["sources"][0]["manifest"]) == {"config.json": b"{}"}
    assert (await job.mirror.plan(source("bt://llama")))["bytes_to_transfer"] == 0


async def test_newest_checkpoint__whatever_its_job_dated_it__is_the_one_committed_last(job: Job) -> None:
    dates = {
        "checkpoint-900": "2099-01-01T00:00:00Z",
        "checkpoint-99": "2026-11-25T10:00:00Z",
        "checkpoint-1000": "2026-11-25T09:00:00Z",
    }
    await job.push({"step.pt": b"older"}, "bt://llama@job2/z", created_at="2099-01-01T00:00:00Z")
    for name, date in dates.items():
        await job.push({"step.pt": name.encode()}, f"bt://llama@job1/{name}", created_at=date)
    # A further version of an older checkpoint stays as old as it was.
    await job.push({"step.pt": b"again"}, "bt://llama@job1/checkpoint-99", created_at="2026-11-26T10:00:00Z")
    listed = await job.checkpoints(job="job1")
    assert [one["checkpoint_id"] for one in listed] == list(dates)
    assert [one["created_at"] for one in listed][1:] == list(dates.values())[1:]
    assert datetime.fromisoformat(listed[0]["created_at"]) <= datetime.now(UTC)
    for uri, step in {"bt://llama": b"checkpoint-1000", "bt://llama@job2": b"older"}.items():
        assert await job.mirror.tree(await job.mirror.manifest(source(uri))) == {"step.pt": step}


async def test_a_mirror_that_runs_on_is_pinned_to_what_latest_was(job: Job) -> None:
    await job.push({"step.pt": b"1"}, "bt://llama@job1/1")
    first = await job.mirror.ready(source("bt://llama"))
    await job.push({"step.pt": b"2"}, "bt://llama@job1/2")
    assert (await job.mirror.get(f"/mirror/{first['id']}"))["sources"][0]["resolved_revision"] == "job1/1"
    assert (await job.mirror.ready(source("bt://llama")))["sources"][0]["resolved_revision"] == "job1/2"


async def test_a_rank_has_checkpoints_of_its_own(job: Job) -> None:
    await job.push({"rank.pt": b"0"})
    await job.push({"rank.pt": b"3"}, f"{STEP}#rank-3")
    for uri, rank in {"bt://llama": b"0", "bt://llama#rank-3": b"3"}.items():
        assert await job.mirror.tree(await job.mirror.manifest(source(uri))) == {"rank.pt": rank}
    assert (await job.mirror.failed(source("bt://llama#rank-1")))["code"] == "REVISION_NOT_FOUND"


async def test_a_checkpoint_is_syncing_while_any_rank_pushes_one_of_its_name(job: Job) -> None:
    await job.push({"rank.pt": b"0"})
    await job.push({"rank.pt": b"0"}, "bt://llama@job1/other")
    push = await job.begin(f"{STEP}#rank-1")
    seen = {one["source"]: one["sync_status"] for one in await job.checkpoints()}
    assert seen == {STEP: "SYNCING", "bt://llama@job1/other": "COMPLETE"}
    await job.send(push, {"rank.pt": b"1"})
    assert (await job.commit(push, {"rank.pt": b"1"})).status_code == 200
    assert {one["sync_status"] for one in await job.checkpoints()} == {"COMPLETE"}


async def test_the_next_version_replaces_the_one_before_and_what_was_mirrored_from_it_stays(job: Job) -> None:
    first = await job.push({"step.pt": b"first"})
    second = await job.push({"step.pt": b"second"})
    assert [one["manifest"] for one in await job.checkpoints()] == [second["sources"][0]["manifest"]]
    assert (await job.mirror.http.get(f"/manifests/{first['sources'][0]['manifest']}")).status_code == 404
    assert (await job.mirror.http.get(f"/mirror/{first['id']}")).status_code == 404
    deployed = await job.mirror.manifest(source(STEP))
    await job.push({"step.pt": b"third"})
    assert await job.mirror.tree(deployed) == {"step.pt": b"second"}


async def test_a_deleted_checkpoint_is_gone_and_its_bytes_with_the_next_collection(job: Job) -> None:
    await job.push(TREE)
    await job.push({"config.json": b"{}"}, "bt://llama@job1/other", checkpoint_type="full")
    checkpoint = next(one for one in await job.checkpoints() if one["source"] == STEP)
    assert (await job.ask("DELETE", f"/checkpoints/{checkpoint['id']}")).json()["source"] == STEP
    assert refusal(await job.ask("DELETE", f"/checkpoints/{checkpoint['id']}")) == (404, "NOT_FOUND")
    assert (await job.mirror.failed(source(STEP)))["code"] == "SOURCE_NOT_FOUND"
    assert (await job.mirror.http.get("/manifests")).json()["items"][0]["restorable_until"] is None
    await job.mirror.collect(grace_seconds=0)
    assert set(chunks_of(TREE)).isdisjoint(f"b3:{name.rpartition('/')[2]}" for name in job.mirror.chunks())
    assert await job.mirror.tree(await job.mirror.manifest(source("bt://llama"))) == {"config.json": b"{}"}


async def test_an_evicted_checkpoint_comes_back_until_it_is_collected(job: Job) -> None:
    await job.push(TREE)
    await job.mirror.evict(source=STEP, tier="mirror")
    assert await job.mirror.tree(await job.mirror.manifest(source(STEP))) == TREE
    await job.mirror.evict(source=STEP, tier="mirror", purge=True)
    assert await job.checkpoints() == []
    assert (await job.mirror.failed(source(STEP)))["code"] == "SOURCE_NOT_FOUND"
    await job.push(TREE)
    assert await job.mirror.tree(await job.mirror.manifest(source(STEP))) == TREE


@pytest.mark.parametrize("selector", [
    {"lru_bytes": 10**12},
    {"all": True},
    {"all": True, "force": True, "purge": True},
    {"source": "hf://org/model"},
], ids=["lru", "all", "purge", "equal-upstream"])  # fmt: skip
async def test_eviction__selector_does_not_name_a_checkpoint__skips_it_and_says_so(
    job: Job, hub: Hub, selector: Json
) -> None:
    hub.repo("org/model").commit({"config.json": b"{}"})
    hub.repo("org/other").commit({"a.txt": b"a"})
    equal = "bt://llama@job1/equal"
    await job.mirror.ready(source("hf://org/model"))
    await job.mirror.ready(source("hf://org/other"))
    await job.push(TREE)
    await job.push({"config.json": b"{}"}, equal)
    evicted = await job.mirror.evict(tier="mirror", **selector)
    is_bulk = "source" not in selector
    names = {name for item in evicted["items"] for name in item["sources"]}
    assert names == ({"hf://org/other"} if is_bulk else set())
    size = 2 + (sum(map(len, TREE.values())) if is_bulk else 0)
    assert (evicted["skipped_pushed"], evicted["skipped_pushed_bytes"]) == (1 + is_bulk, size)
    await job.mirror.collect(grace_seconds=0)
    assert await job.mirror.tree(await job.mirror.manifest(source(STEP))) == TREE
    assert len(await job.checkpoints()) == 2
    by_name = await job.mirror.evict(tier="mirror", source=STEP)
    assert ([item["sources"] for item in by_name["items"]], by_name["skipped_pushed"]) == ([[STEP]], 0)


async def test_push__kept_open_for_long__keeps_its_chunks_and_stops_no_collection(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0], collect_seconds=0) as mirror:
        job = Job(mirror)
        async with job.plane:
            push = await job.begin()
            await job.send(push, TREE)
            other = await job.begin("bt://llama@job1/other")
            await job.put(other, name_of(b"given up"), b"given up")
            await job.ask("DELETE", f"/pushes/{other}")
            for _ in range(3):
                at[0] += 0.9 * GIVEN_UP_SECONDS
                assert await job.missing(push, []) == []
            await mirror.collect(grace_seconds=0)
            assert sum(mirror.chunks().values()) == sum(map(len, TREE.values()))
            done = (await job.commit(push, TREE)).json()
            assert await mirror.tree(done["sources"][0]["manifest"]) == TREE


async def test_chunks_of_what_the_organisation_mirrored_are_not_sent(job: Job, hub: Hub) -> None:
    hub.repo("org/model").commit({"model.safetensors": TREE["model.safetensors"], "small": b"in a slab"})
    await job.mirror.ready(source("hf://org/model"))
    push = await job.begin()
    tree = {"weights": TREE["model.safetensors"], "small": b"in a slab"}
    assert await job.send(push, tree) == 0
    assert await job.mirror.tree((await job.commit(push, tree)).json()["sources"][0]["manifest"]) == tree


async def test_beyond_the_quota_nothing_is_committed(tmp_path: Path) -> None:
    large, other = LARGE.read(0, 8 * MIB), LARGE.read(1, 3 * MIB)
    async with mirror_under_test(tmp_path / "mirror", serve=True, limit_push_bytes=10 * MIB) as mirror:
        job = Job(mirror)
        async with job.plane:
            await job.push({"a": large})
            push = await job.begin("bt://llama@job1/second")
            await job.send(push, {"b": other})
            answer = await job.commit(push, {"b": other})
            assert refusal(answer) == (507, "QUOTA_EXCEEDED")
            assert answer.json()["error"]["retryable"]
            await job.push({"a": large, "same": large}, "bt://llama@job1/third")  # counts once
            for rest in (LARGE.read(2, MIB), LARGE.read(3, MIB)):  # each instead of the version before
                await job.push({"a": large, "rest": rest}, "bt://llama@job1/third")
            for checkpoint in await job.checkpoints():
                await job.ask("DELETE", f"/checkpoints/{checkpoint['id']}")
            assert (await job.commit(push, {"b": other})).status_code == 200


async def test_chunks_beyond_the_quota__are_not_stored_while_they_are_not_committed(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path / "mirror", serve=True, limit_push_bytes=1000) as mirror:
        job = Job(mirror)
        async with job.plane:
            first, second = [await job.begin(f"bt://llama@job1/{name}") for name in ("first", "second")]
            contents = {name_of(one): one for one in (b"a" * 400, b"b" * 400, b"c" * 400, b"d" * 400)}
            sent = zip([first, second, first, second], contents.items(), strict=True)
            answers = await asyncio.gather(*[job.put(push, name, content) for push, (name, content) in sent])
            refused = [answer for answer in answers if answer.status_code != 204]
            assert refused
            assert {refusal(answer) for answer in refused} == {(507, "QUOTA_EXCEEDED")}
            assert sum(mirror.chunks().values()) <= 1000
            for push in (first, second):
                await job.ask("DELETE", f"/pushes/{push}")

            # What a push that ended had sent counts no more, and a chunk that is sent again counts once.
            third, most = await job.begin("bt://llama@job1/third"), b"e" * 600
            for _ in range(3):
                assert (await job.put(third, name_of(most), most)).status_code == 204
            assert refusal(await job.put(third, name_of(b"f" * 401), b"f" * 401)) == (507, "QUOTA_EXCEEDED")
            seen = await mirror.get(f"/mirror/{third}")
            assert (seen["status"], seen["error"]["code"]) == ("FAILED", "QUOTA_EXCEEDED")
            await job.push({"a": most}, "bt://llama@job1/fourth")


async def test_organisation_at_its_quota__leaves_the_quota_of_others(tmp_path: Path) -> None:
    async with mirror_under_test(tmp_path / "mirror", serve=True, limit_push_bytes=1000) as mirror:
        first, second = Job(mirror), Job(mirror)
        second.headers = {"BDN-Organisation": "b"}
        async with first.plane, second.plane:
            push = await first.begin()
            assert (await first.put(push, name_of(b"0" * 1000), b"0" * 1000)).status_code == 204
            assert refusal(await first.put(push, name_of(b"x"), b"x"))[1] == "QUOTA_EXCEEDED"
            await second.push({"b": b"9" * 400})


async def test_project__whose_name_holds_spaces__is_pushed_mirrored_listed_and_removed(job: Job) -> None:
    for step in ("1", "2"):
        await job.push({"step.pt": step.encode()}, f"bt://My Fine%20Tune@job1/{step}")
    assert {one["source"] for one in await job.checkpoints(project="My Fine Tune")} == {
        f"bt://My Fine Tune@job1/{step}" for step in ("1", "2")
    }
    for uri in ("bt://My Fine Tune", "bt://My%20Fine%20Tune@job1/2"):
        assert await job.mirror.tree(await job.mirror.manifest(source(uri))) == {"step.pt": b"2"}
    granted = await job.ask("POST", "/pushes/grants", job="bt://My Fine Tune@job1")
    assert granted.json()["job"] == "bt://My Fine Tune@job1"
    assert (await job.ask("DELETE", "/projects/My%20Fine%20Tune")).status_code == 200
    assert await job.checkpoints() == []
    for wrong in ("bt:// x@job/1", "bt://x @job/1", "bt://a%2Fb@job/1", "bt://a%40b@job/1"):
        assert refusal(await job.ask("POST", "/pushes", source=wrong)) == (422, "INVALID_SOURCE"), wrong


async def test_a_push_for_which_nobody_calls_any_more_fails(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0]) as mirror:
        job = Job(mirror)
        async with job.plane:
            push = await job.begin()
            at[0] += 3000
            await job.send(push, {"a": b"1"})
            at[0] += 3000  # it was called for meanwhile
            assert (await mirror.get(f"/mirror/{push}"))["status"] == "SYNCING"
            at[0] += 3700
            assert (await mirror.ended(push))["error"]["code"] == "PUSH_GIVEN_UP"
            assert refusal(await job.commit(push, {"a": b"1"})) == (404, "NOT_FOUND")


async def test_checkpoints_are_kept_for_their_time(tmp_path: Path) -> None:
    at = [1_800_000_000.0]
    async with mirror_under_test(tmp_path / "mirror", serve=True, clock=lambda: at[0]) as mirror:
        job = Job(mirror)
        async with job.plane:
            await job.push({"a": b"1"})
    at[0] += 101
    async with mirror_under_test(tmp_path / "mirror", clock=lambda: at[0], checkpoint_seconds=100) as mirror:
        await until(lambda: not mirror.count("checkpoints"))


async def bearers_of_teams(mirror: MirrorUnderTest) -> dict[str | None, str]:
    """Tokens of two teams of an organisation, and one without a team."""
    operator, found = {"Authorization": "Bearer operator"}, dict[str | None, str]()
    await mirror.http.post("/teams", json={"name": "beta"}, headers=operator | {"BDN-Organisation": "a"})
    for team in ("beta", "Default", None):
        body = {"name": "job", "organisation": "a", "role": "controller", "team": team}
        found[team] = (await mirror.http.post("/tokens", json=body, headers=operator)).json()["token"]
    return found


async def test_push_grant__chunk_of_another_team__is_missing_as_an_unknown_one_and_the_answer_reads_nothing(
    tmp_path: Path,
) -> None:
    tree, name = {"x": b"of beta alone"}, str(digest_of(b"of beta alone"))
    async with mirror_under_test(tmp_path / "mirror", serve=True, auth="token", token="operator") as mirror:
        tokens = await bearers_of_teams(mirror)
        owner, controller = Job(mirror, tokens["beta"]), Job(mirror, tokens[None])
        granted = await controller.ask("POST", "/pushes/grants", job="bt://llama@job1")
        job = Job(mirror, granted.json()["grant"])
        async with owner.plane, controller.plane, job.plane:
            await owner.push(tree, "bt://theirs@job/checkpoint-1")
            push = await job.begin()
            unknown = str(digest_of(b"of nobody"))
            assert await job.missing(push, [name, unknown]) == [name, unknown]
            assert refusal(await job.commit(push, tree)) == (409, "CHUNKS_MISSING")
            assert (await job.put(push, name, tree["x"])).status_code == 204
            for _ in range(2):  # the second says the first again
                answer = await job.commit(push, tree)
                assert (answer.status_code, answer.json()["grant"]) == (200, None), answer.text
            assert await job.missing(await job.begin("bt://llama@job1/checkpoint-2"), [name]) == []
            seen = await controller.ask("GET", f"/mirror/{push}")
            assert seen.json()["grant"] is not None

            # An agent, which has a token of its own, gets the grant for the newest checkpoint that it keeps.
            body = {"name": "agent", "organisation": "a", "role": "agent"}
            made = await mirror.http.post("/tokens", json=body, headers={"Authorization": "Bearer operator"})
            for token, gets_one in ((made.json()["token"], True), (tokens[None], False), ("bdn_" + "x" * 43, False)):
                job.headers["BDN-Agent-Token"] = token
                assert ((await job.commit(push, tree)).json()["grant"] is not None) == gets_one


async def test_push_grant__without_a_team__counts_on_what_the_organisation_mirrored(tmp_path: Path, hub: Hub) -> None:
    hub.repo("org/base").commit({"model.safetensors": TREE["model.safetensors"]})
    async with mirror_under_test(tmp_path / "mirror", serve=True, auth="token", token="operator") as mirror:
        tokens = await bearers_of_teams(mirror)
        names = list(chunks_of({"x": TREE["model.safetensors"]}))
        for team, expected in ((None, []), ("beta", names)):
            controller = Job(mirror, tokens[team])
            if team is None:
                asked = await controller.ask("POST", "/mirror", weights=[source("hf://org/base")])
                ended = await controller.ask("GET", f"/mirror/{asked.json()['id']}?wait=60")
                assert ended.json()["status"] == "READY"
            granted = await controller.ask("POST", "/pushes/grants", job=f"bt://{team}@job1")
            job = Job(mirror, granted.json()["grant"])
            async with controller.plane, job.plane:
                push = await job.begin(f"bt://{team}@job1/checkpoint-1")
                assert await job.missing(push, names) == expected


async def test_newest__folder_of_logs_and_rank_without_metadata_committed_last__is_the_one_with_weights(
    job: Job,
) -> None:
    await job.push({"events.out.tfevents.1": b"x"}, "bt://llama@job1/runs")
    assert (await job.mirror.failed(source("bt://llama")))["code"] == "SOURCE_NOT_FOUND"  # nothing has weights
    await job.push(TREE)
    await job.push({"events.out.tfevents.2": b"x"}, "bt://llama@job1/runs")
    await job.push({"latest": b"checkpoint-100"}, "bt://llama@job1/.")
    await job.push({"__1_0.distcp": b"x"}, "bt://llama@job1/step-7#rank-1")

    for named in ("bt://llama", "bt://llama@job1"):
        (part,) = (await job.mirror.ready(source(named)))["sources"]
        assert part["resolved_revision"] == "job1/checkpoint-100"
    assert (await job.mirror.ready(source("bt://llama@job1/runs")))["status"] == "READY"
    found = {one["checkpoint_id"]: one["is_loadable"] for one in await job.checkpoints()}
    assert found == {"checkpoint-100": True, "runs": False, ".": False, "step-7": False}


async def test_newest__is_found_without_reading_the_details_of_checkpoints(job: Job) -> None:
    for name in ("1", "2"):
        await job.push({"step.pt": b"x"}, f"bt://llama@job1/{name}", base_model="of 64 KiB")
    async with job.mirror.service.requests.database.read() as session:
        found = await checkpoints.found(session, "default", CheckpointUri("llama"))
        assert found.row.name == "2"
        assert "details" in inspect(found.row).unloaded
