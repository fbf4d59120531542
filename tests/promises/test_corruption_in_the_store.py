"""The mirror's store as a disk leaves it: damage is found, put away, and only that is fetched again."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.manifest import PageRef, Root
from bdn.core.store import MirrorStore
from bdn.mirror.upkeep.repair import AGAIN_SECONDS, Repair
from bdn.mirror.upkeep.scrub import Keeper
from bdn.store.directory import DirectoryStore
from bdn.wire import operation_schema
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.doubles.faults import answer
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.s3 import S3Bucket
from tests.fakes.clock import Clock
from tests.support.content.layouts import pieces
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.crash.rot import HOW, not_permitted, rot
from tests.support.mirror.backends import behind
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    Json,
    MirrorUnderTest,
    mirror_under_test,
    source,
    until,
    with_secret,
)
from tests.support.promises.tally import Tally, at_scale
from tests.support.services import services
from tests.support.services.commands import wait_until

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [pytest.mark.promise("corruption"), pytest.mark.usefixtures("backend")]
PERIOD: Final = 7 * 24 * 3600.0
LARGE: Final = noise(17 * MIB + 3, 1)
ONE: Final = noise(3_000_000, 6)
SMALL: Final = {f"small/{number}.txt": f"small file {number}".encode() * 9 for number in range(12)}
TREE: Final = {"model.safetensors": LARGE, "one.bin": ONE, **SMALL}
MODEL: Final = source("hf://org/model")
MIDDLE: Final = pieces(LARGE)[1]
PLACES: Final = {"one": ONE, "middle": MIDDLE, "slab": b"".join(SMALL[path] for path in sorted(SMALL))}
SCENARIOS: Final = list(product(HOW, [*PLACES, "page", "root"]))
of_files = pytest.mark.embedded("it is about the files of a directory")


@dataclass
class Store:
    """A mirror that holds ``TREE``, whose store does what a test says."""

    mirror: MirrorUnderTest
    hub: Hub
    repository: HubRepository
    clock: Clock
    manifest: str
    page: PageRef

    def rot(self, how: str, place: str) -> Digest:
        """From now on it has other bytes under this name."""
        self.hub.log.clear()
        documents = {"root": Digest.parse(self.manifest), "page": self.page.digest}
        name = documents.get(place) or digest_of(PLACES[place])
        with self.mirror.behind.chunk(name) as stored:
            rot(stored, how)
        return name

    def path(self, place: str) -> Path:
        """Of a chunk in a directory."""
        return self.mirror.data_dir / "store/chunks" / digest_of(PLACES[place]).fanout

    def contents_read(self) -> int:
        """Bytes of files that the upstream sent since the last rot."""
        asked = [one for one in self.hub.log.find() if one.status in (200, 206)]
        return sum(one.bytes_served for one in asked if "/api/models" not in one.target)

    async def is_right(self) -> bool:
        return await self.mirror.tree(self.manifest) == TREE

    async def until_scrubbed(self) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            while await self.mirror.metric("bdn_mirror_scrub_round_timestamp_seconds") < self.clock.now:
                pass

    async def a_round_later(self) -> None:
        self.clock.now += PERIOD
        await self.until_scrubbed()

    async def until_repaired(self) -> None:
        """By the next attempt."""
        self.clock.now += AGAIN_SECONDS
        await until(lambda: not self.mirror.damaged())


@pytest.fixture
async def store(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[Store]:
    repository = hub.repo("org/model")
    repository.commit(TREE)
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=PERIOD, collect_seconds=0) as mirror:
        manifest = await mirror.manifest(MODEL)
        [page] = await mirror.pages(manifest)
        found = Store(mirror, hub, repository, clock, manifest, page)
        assert (await mirror.verify())["items"] == []
        await until(
            lambda: mirror.behind.query("SELECT 1 FROM facts WHERE name = ?", "scrub"),
            "the round that a new store begins with",
        )
        yield found


async def test_what_cannot_be_repaired_holds_up_no_scrub(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an attempt takes, and whatever is lost: the next one is due at once."""
    monkeypatch.setattr(Repair, "is_due", lambda *_: True)
    store.hub.fail(answer(404), times=None)
    store.rot("absent", "one")
    assert (await store.mirror.verify())["items"]
    assert store.mirror.damaged()
    await store.a_round_later()


@pytest.mark.production
async def test_a_verification_finds_and_tells_every_damage(store: Store, tally: Tally) -> None:
    kept, can_fail = 0, store.mirror.behind.store_type is DirectoryStore  # to be read, while all others can be
    scenarios = [(how, place) for how, place in SCENARIOS if can_fail or how != "unreadable"]
    size = (await store.mirror.verify(manifest=store.manifest))["bytes_read"]
    assert size > sum(map(len, TREE.values())) + store.page.size, "the documents as well"
    for how, place in Random(20261123).sample(scenarios, at_scale(4, len(scenarios))):
        name = store.rot(how, place)
        found = await store.mirror.verify(source="hf://org/model")
        (item,) = found["items"]
        assert (found["status"], item["outcome"], item["chunk"]) == ("DONE", "repaired", str(name)), (how, place, found)
        assert (item["tier"], item["manifest"], item["sources"]) == ("mirror", store.manifest, ["hf://org/model"])
        content = PLACES.get(place, b"")
        assert (item["path"] is None) == (not content)
        assert not content or place == "middle" or TREE[item["path"]] in content
        assert (found["chunks_read"], found["bytes_read"]) == (7, size)
        assert store.contents_read() == len(content)
        kept += how != "absent"
        assert len(store.mirror.behind.evidence()) == kept
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())
    assert (await store.mirror.verify(manifest=store.manifest))["items"] == []


async def test_a_damaged_document_is_refused_as_damaged_and_repaired_on_its_reader_s_word(
    store: Store, tally: Tally
) -> None:
    for place, path in (("root", f"/manifests/{store.manifest}"), ("page", f"/chunks/{store.page.digest}")):
        store.repository.disabled = True
        name = store.rot("flipped", place)
        refusal = await store.mirror.http.get(path, headers={SUSPECT_HEADER: "1"})
        error = refusal.json()["error"]
        assert (refusal.status_code, error["code"]) == (503, "STORE_UNAVAILABLE"), place
        assert str(name) in error["message"]
        await until(store.mirror.damaged)
        store.repository.disabled = False
        await store.until_repaired()
        tally.add(scenarios=1, faults=1, refused=1, repaired=1, wrong=not await store.is_right())


async def test_more_is_repaired_than_is_listed(store: Store, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    monkeypatch.setattr(operation_schema, "LISTED", 2)
    for place in PLACES:
        store.rot("flipped", place)
    found = await store.mirror.verify()
    assert (found["status"], found["error"]["code"], len(found["items"])) == ("FAILED", "LIMIT_EXCEEDED", 2)
    tally.add(scenarios=1, faults=len(PLACES), repaired=len(PLACES), wrong=not await store.is_right())
    again = await store.mirror.verify()
    assert (again["status"], again["error"], again["items"]) == ("DONE", None, [])


async def test_what_was_only_looked_for_is_fetched_by_the_next_mirror(store: Store, tally: Tally) -> None:
    for place, content in PLACES.items():
        name = store.rot("flipped", place)
        found = await store.mirror.verify(repair=False)
        assert (found["status"], [item["outcome"] for item in found["items"]]) == ("DAMAGED", ["damaged"])
        refusal = await store.mirror.http.get(f"/chunks/{name}", headers={SUSPECT_HEADER: "1"})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "STORE_UNAVAILABLE")
        assert "damaged" in refusal.json()["error"]["message"]
        planned = await store.mirror.plan(MODEL)
        assert planned["bytes_to_transfer"] == len(content)
        done = await store.mirror.ready(MODEL)
        assert done["bytes_transferred"] == store.contents_read() == len(content), place
        assert done["sources"][0]["manifest"] == store.manifest
        assert store.mirror.damaged() == 0
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


async def test_a_mirror_is_never_ready_that_counts_on_a_damaged_chunk(store: Store, tally: Tally) -> None:
    for place in PLACES:
        store.rot("zeroed", place)
        await store.mirror.verify(repair=False)
        store.hub.fail(answer(404), "/resolve|/repos/", times=None)  # of contents: metadata can be had
        document = await store.mirror.mirror(MODEL)
        assert document["status"] == "FAILED", place
        store.hub.script.clear()
        assert (await store.mirror.verify())["status"] == "DONE"
        tally.add(scenarios=1, faults=2, refused=1, repaired=1, wrong=not await store.is_right())


async def test_an_upstream_that_has_changed_does_not_repair_and_is_mirrored_as_new(
    upstreams: None, bucket: S3Bucket, tmp_path: Path, tally: Tally
) -> None:
    bucket.put({"one.bin": ONE})
    wanted = source(f"s3://{bucket.name}", **with_secret("s3-keys"))
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0) as mirror:
        first = await mirror.manifest(wanted)
        with mirror.behind.chunk(digest_of(ONE)) as stored:
            rot(stored, "flipped")
        other = bytes([ONE[0] ^ 1]) + ONE[1:]
        bucket.put({"one.bin": other})
        found = await mirror.verify()
        (item,) = found["items"]
        assert (found["status"], item["outcome"]) == ("DAMAGED", "lost")
        assert "has changed since it was mirrored" in item["reason"]
        (item,) = (await mirror.verify("another"))["items"]
        assert (bucket.name in item["reason"], "another organisation's source" in item["reason"]) == (False, True)
        refusal = await mirror.http.get(f"/chunks/{digest_of(ONE)}", headers={SUSPECT_HEADER: "1"})
        assert refusal.status_code == 503
        second = await mirror.manifest(wanted)
        assert second != first
        wrong = int(await mirror.tree(second) != {"one.bin": other})
        bucket.put({"one.bin": ONE})
        assert (await mirror.verify())["status"] == "DONE"
        wrong += await mirror.tree(first) != {"one.bin": ONE}
    tally.add(scenarios=1, faults=1, repaired=1, refused=1, wrong=wrong)


@of_files
async def test_a_chunk_that_may_not_be_read_is_repaired_and_the_scrub_goes_on(store: Store, tally: Tally) -> None:
    store.hub.log.clear()
    with not_permitted({store.path("middle")}):
        await store.a_round_later()
        await until(lambda: not store.mirror.damaged())
        assert store.contents_read() == len(MIDDLE)
        assert await store.mirror.metric("bdn_mirror_repaired_chunks_total") == 1
        assert await store.mirror.metric("bdn_mirror_evidence_chunks") == len(store.mirror.behind.evidence())
        assert await store.mirror.metric("bdn_mirror_scrubbed_bytes_total") > 0
        assert store.path("middle").read_bytes() == MIDDLE
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


@contextmanager
def made_a_file(folder: Path) -> Iterator[None]:
    """As a file system that was mended leaves a folder that it could not read."""
    shutil.rmtree(folder)
    folder.touch()
    yield
    folder.unlink()


UNTOUCHABLE: Final[dict[str, tuple[Callable[[Path], AbstractContextManager[None]], str]]] = {
    "chunk": (lambda chunk: not_permitted({chunk}, also_moving=True), "Permission denied"),
    "folder": (lambda chunk: made_a_file(chunk.parent), "Not a directory"),
    "folder above": (lambda chunk: made_a_file(chunk.parents[1]), "Not a directory"),
}


@of_files
@pytest.mark.parametrize("what", UNTOUCHABLE)
async def test_what_nobody_may_touch_costs_what_is_in_it_and_keeps_nobody_from_anything_else(
    store: Store, what: str, tally: Tally
) -> None:
    break_it, reason = UNTOUCHABLE[what]
    other, others = {"other.bin": noise(2_000_000, 7)}, ("org/other", "org/second", "org/third")
    for name in others:
        store.hub.repo(name).commit(other)
    with break_it(store.path("middle")):
        store.rot("flipped", "one")
        await store.a_round_later()
        assert (await store.mirror.http.get(f"/chunks/{digest_of(MIDDLE)}")).status_code == 503
        found = await store.mirror.verify()
        (item,) = found["items"]
        assert (found["status"], item["outcome"], item["chunk"]) == ("DAMAGED", "lost", str(digest_of(MIDDLE)))
        assert f"it cannot be read ({reason})" in item["reason"]
        # A listing's digest depends on the upstream's port: one of 256 belongs into the broken folder above.
        besides = [await store.mirror.mirror(source(f"hf://{name}")) for name in others]
        mirrored = [one["sources"][0]["manifest"] for one in besides if one["status"] == "READY"]
        failed = [one["error"]["message"] for one in besides if one["status"] != "READY"]
        assert not failed or what == "folder above"
        assert all("File exists" in message for message in failed)
        tally.add(scenarios=2, faults=2, refused=1, wrong=await store.mirror.tree(mirrored[0]) != other)
    await store.until_repaired()
    tally.add(repaired=2, wrong=not await store.is_right())


async def test_a_lost_chunk_stops_no_other_mirror(store: Store, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    name = store.rot("flipped", "middle")
    await store.mirror.verify(repair=False)
    store_type = store.mirror.behind.store_type
    fault: Callable[[MirrorStore, Digest], str | None] = store_type.fault

    def stale(self: MirrorStore, digest: Digest) -> str | None:
        if digest == name:
            raise StoreUnavailableError("Stale file handle")
        return fault(self, digest)

    other = {"other.bin": noise(2_000_000, 7)}
    store.hub.repo("org/other").commit(other)
    with monkeypatch.context() as patched:
        patched.setattr(store_type, "fault", stale)
        manifest = await store.mirror.manifest(source("hf://org/other"))
        tally.add(scenarios=1, faults=1, wrong=await store.mirror.tree(manifest) != other)
        assert store.mirror.damaged() == 1
    await store.mirror.ready(MODEL)
    tally.add(repaired=1, wrong=not await store.is_right() or store.mirror.damaged())


async def test_who_suspects_a_chunk_of_the_api_gets_it_after_it_was_read(store: Store, tally: Tally) -> None:
    name = store.rot("flipped", "one")
    store.repository.disabled = True
    suspecting = {SUSPECT_HEADER: "1"}
    refusal = await store.mirror.http.get(f"/chunks/{name}", headers=suspecting)
    tally.add(scenarios=1, faults=1, refused=1, wrong=refusal.is_success)
    assert "damaged" in refusal.json()["error"]["message"]
    store.repository.disabled = False
    assert (await store.mirror.verify())["status"] == "DONE"
    answer = await store.mirror.http.get(f"/chunks/{name}", headers=suspecting)
    tally.add(repaired=1, wrong=answer.content != ONE)


async def test_a_repair_waits_for_no_verification(store: Store, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 0

    async def another_part(_: object) -> bool:
        nonlocal parts
        parts += 1
        await asyncio.sleep(0)
        return True

    store.rot("flipped", "middle")
    await store.mirror.verify(repair=False)
    monkeypatch.setattr(Keeper, "verify_next", another_part)  # of a store that is never read to its end
    await until(lambda: parts)
    store.clock.now += AGAIN_SECONDS
    some_later = parts + 3
    await until(lambda: parts >= some_later)
    assert not store.mirror.damaged()
    tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


# --- Wrong bytes of the store as agents, and several processes, meet them ---


@pytest.fixture
def model(hub: Hub) -> Iterator[Hub]:
    hub.repo("org/model").commit(TREE)
    yield hub
    hub.script.clear()


# httpx2 leaves a refused socket to itself
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stage_that_gets_wrong_bytes_makes_the_mirror_mend_them(model: Hub, tmp_path: Path, tally: Tally) -> None:
    environment = {"HF_ENDPOINT": model.url, "BDN_SCRUB_SECONDS": "0"}
    with (
        services.mirror(tmp_path / "mirror", **environment) as mirror,
        services.agent(tmp_path / "one", mirror.url, BDN_AGENT_CLUSTER="a") as one,
        services.agent(tmp_path / "two", mirror.url, BDN_AGENT_CLUSTER="b") as two,
    ):
        grant = mirror.ready("hf://org/model")["grant"]
        one.stage(grant, "first")
        holds = lambda: [each["manifests"] for each in mirror.http.get("/agents").json()["items"]] == [1, 0]  # noqa: E731
        wait_until(holds, seconds=60, what="the first agent's holdings")
        model.fail(answer(503), times=None)
        model.log.clear()
        manifest = next(iter(mirror.http.get("/manifests").json()["items"]))["manifest"]
        page = Root.parse(mirror.http.get(f"/manifests/{manifest}").content).pages[0].digest
        # A slab comes from its upstream: this agent has the files in it, not the slab.
        damaged = [digest_of(ONE), digest_of(MIDDLE), page]
        right: list[bytes] = []
        for digest, how in zip(damaged, ("truncated", "flipped", "zeroed"), strict=True):
            with behind(mirror.shell.data).chunk(digest) as stored:
                right.append(stored.read_bytes())
                rot(stored, how)
        stage = two.stage(grant, "second")
        wrong = int(tree(Path(stage["mounts"][0]["path"])) != TREE)
        assert services.metric(mirror.http, "bdn_mirror_repaired_chunks_total") == len(damaged)
        assert services.metric(mirror.http, "bdn_mirror_evidence_chunks") == len(damaged)
        assert services.metric(mirror.http, "bdn_mirror_damaged_chunks") == 0
        for digest, content in zip(damaged, right, strict=True):
            with behind(mirror.shell.data).chunk(digest) as stored:
                wrong += stored.read_bytes() != content
        assert model.log.count() == 0, "the upstream was asked although an agent had it"
        tally.add(scenarios=len(damaged), faults=len(damaged), repaired=len(damaged), wrong=wrong)


@pytest.mark.production
@pytest.mark.promise("collection")
async def test_what_an_eviction_takes_while_it_is_verified_is_not_called_damaged(
    upstreams: None, model: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    evicted: list[Json] = []
    faults: list[str | None] = []
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, tombstone_seconds=0) as mirror:
        await mirror.ready(MODEL)

        async def evict() -> Json:
            document = await mirror.evict(all=True, tier="mirror")
            await mirror.collect(grace_seconds=0)
            return document

        store_type = mirror.behind.store_type
        fault = store_type.fault

        def evict_first(store: MirrorStore, digest: object) -> str | None:
            if not evicted:
                evicted.append(asyncio.run_coroutine_threadsafe(evict(), loop).result(LONGEST_SECONDS))
            faults.append(fault(store, digest))
            return faults[-1]

        monkeypatch.setattr(store_type, "fault", evict_first)
        found = await mirror.verify()
        assert (found["status"], found["items"]) == ("DONE", [])
        assert evicted[0]["status"] == "DONE"
        assert faults[0] == "it is absent"
        assert mirror.damaged() == 0


@pytest.mark.embedded("it has PostgreSQL and a directory by itself")
async def test_of_two_processes_one_reads_the_store_and_the_other_takes_over_where_it_was(
    upstreams: None, model: Hub, postgres_url: str, tmp_path: Path, tally: Tally
) -> None:
    shared: dict[str, Any] = {"database_url": postgres_url, "store": f"file://{tmp_path}/store"}

    async def verify(mirror: MirrorUnderTest, how: str) -> int:
        rot(tmp_path / "store/chunks" / digest_of(ONE).fanout, how)
        found = await mirror.verify()
        assert [item["outcome"] for item in found["items"]] == ["repaired"]
        size: int = found["bytes_read"]
        return size

    async with mirror_under_test(tmp_path / "b", scrub_seconds=0, **shared) as last:
        async with mirror_under_test(tmp_path / "a", scrub_seconds=0, **shared) as first:
            await first.ready(MODEL)
            size = await verify(first, "flipped")
            read = [await one.metric("bdn_mirror_scrubbed_bytes_total") for one in (first, last)]
            assert sorted(read) == [0, size], "both read it"
        assert await verify(last, "zeroed") == size
    content = (tmp_path / "store/chunks" / digest_of(ONE).fanout).read_bytes()
    tally.add(scenarios=2, faults=2, repaired=2, wrong=content != ONE)
