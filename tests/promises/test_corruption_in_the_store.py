"""The mirror's store as a disk leaves it, and its records: damage is found, put away, and only that is fetched again."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Final

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.mirror.scrub import AGAIN_SECONDS, Keeper
from bdn.store.directory import DirectoryStore
from bdn.wire import operation_schema
from bdn.wire.http_fields import SUSPECT_HEADER
from tests.doubles.faults import answer
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.doubles.s3 import S3Bucket
from tests.support.agent.rig import Clock, noise
from tests.support.crash.rot import HOW, not_permitted, rot
from tests.support.mirror.service import (
    LONGEST_SECONDS,
    Json,
    MirrorUnderTest,
    mirror_under_test,
    source,
    until,
    with_secret,
)
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = pytest.mark.promise("corruption")
PERIOD: Final = 7 * 24 * 3600.0
LARGE: Final = noise(2 * CHUNK_SIZE + 12345, 5)
ONE: Final = noise(3_000_000, 6)
SMALL: Final = {f"small/{number}.txt": f"small file {number}".encode() * 9 for number in range(12)}
TREE: Final = {"model.safetensors": LARGE, "one.bin": ONE, **SMALL}
MODEL: Final = source("hf://org/model")
MIDDLE: Final = LARGE[CHUNK_SIZE : 2 * CHUNK_SIZE]
PLACES: Final = {"one": ONE, "middle": MIDDLE, "slab": b"".join(SMALL[path] for path in sorted(SMALL))}
SCENARIOS: Final = list(product(HOW, PLACES))


@dataclass
class Store:
    """A mirror that holds ``TREE``, whose disk does what a test says."""

    mirror: MirrorUnderTest
    hub: Hub
    repository: HubRepository
    clock: Clock
    manifest: str

    @property
    def folder(self) -> Path:
        return self.mirror.data_dir / "store"

    def rot(self, how: str, place: str) -> Digest:
        """From now on the disk has other bytes under this name."""
        self.hub.log.clear()
        name = digest_of(PLACES[place])
        rot(self.folder / "chunks" / name.fanout, how)
        return name

    def path(self, place: str) -> Path:
        return self.folder / "chunks" / digest_of(PLACES[place]).fanout

    def contents_read(self) -> int:
        """Bytes of files that the upstream sent since the last rot."""
        asked = [one for one in self.hub.log.find() if one.status in (200, 206)]
        return sum(one.bytes_served for one in asked if "/api/models" not in one.target)

    async def is_right(self) -> bool:
        return await self.mirror.tree(self.manifest) == TREE

    def evidence(self) -> list[Path]:
        return sorted((self.folder / "quarantine").glob("*"))


@pytest.fixture
async def store(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[Store]:
    repository = hub.repo("org/model")
    repository.commit(TREE)
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=PERIOD, collect_seconds=0) as mirror:
        document = await mirror.ready(MODEL)
        found = Store(mirror, hub, repository, clock, document["sources"][0]["manifest"])
        assert (await mirror.verify())["items"] == []
        yield found


async def test_the_scrub_finds_every_damage_and_fetches_it_alone(store: Store, tally: Tally, scale: Scale) -> None:
    await until(lambda: store.mirror.rows("scrubs")["scrubs"])  # the round that a new store begins with
    sample = Random(20261122).sample(SCENARIOS, scale.of(4, len(SCENARIOS)))
    for repaired, (how, place) in enumerate(sample, start=1):
        name = store.rot(how, place)
        assert not store.mirror.count("damaged_chunks")
        store.clock.now += PERIOD
        async with asyncio.timeout(LONGEST_SECONDS):
            while await store.mirror.metric("bdn_mirror_repaired_chunks_total") < repaired:
                pass
        assert store.contents_read() == len(PLACES[place]), (how, place)
        assert (store.folder / "chunks" / name.fanout).read_bytes() == PLACES[place]
        assert store.mirror.count("damaged_chunks") == 0
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())
    evidence = len(store.evidence())
    assert evidence == await store.mirror.metric("bdn_mirror_evidence_chunks")
    assert await store.mirror.metric("bdn_mirror_scrubbed_bytes_total") > 0
    await _until_scrubbed(store)


async def _until_scrubbed(store: Store) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while await store.mirror.metric("bdn_mirror_scrub_round_timestamp_seconds") < store.clock.now:
            pass


async def test_a_verification_finds_and_tells_every_damage(store: Store, tally: Tally, scale: Scale) -> None:
    kept = 0
    for how, place in Random(20261123).sample(SCENARIOS, scale.of(4, len(SCENARIOS))):
        name = store.rot(how, place)
        found = await store.mirror.verify(source="hf://org/model")
        (item,) = found["items"]
        assert (found["status"], item["outcome"], item["chunk"]) == ("DONE", "repaired", str(name)), (how, place, found)
        assert (item["tier"], item["manifest"], item["sources"]) == ("mirror", store.manifest, ["hf://org/model"])
        assert TREE[item["path"]] in PLACES[place] or place == "middle"
        assert (found["chunks_read"], found["bytes_read"]) == (5, sum(map(len, TREE.values())))
        assert store.contents_read() == len(PLACES[place])
        kept += how != "absent"
        assert len(store.evidence()) == kept
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())
    assert (await store.mirror.verify(manifest=store.manifest))["items"] == []


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
        refusal = await store.mirror.http.get(f"/chunks/{name}")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "STORE_UNAVAILABLE")
        assert "damaged" in refusal.json()["error"]["message"]
        planned = await store.mirror.plan(MODEL)
        assert planned["bytes_to_transfer"] == len(content)
        done = await store.mirror.ready(MODEL)
        assert done["bytes_transferred"] == store.contents_read() == len(content), place
        assert done["sources"][0]["manifest"] == store.manifest
        assert store.mirror.count("damaged_chunks") == 0
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


async def test_what_nobody_has_is_not_served_and_repaired_once_somebody_has_it(store: Store, tally: Tally) -> None:
    store.rot("truncated", "middle")
    store.repository.disabled = True
    found = await store.mirror.verify()
    (item,) = found["items"]
    assert (found["status"], item["outcome"]) == ("DAMAGED", "lost")
    assert await store.mirror.metric("bdn_mirror_damaged_chunks") == 1
    assert (await store.mirror.http.get(f"/chunks/{digest_of(MIDDLE)}")).status_code == 503
    store.repository.disabled = False
    store.clock.now += AGAIN_SECONDS
    await until(lambda: store.mirror.count("damaged_chunks") == 0)
    tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


async def test_an_upstream_that_has_changed_does_not_repair_and_is_mirrored_as_new(
    upstreams: None, bucket: S3Bucket, tmp_path: Path, tally: Tally
) -> None:
    bucket.put({"one.bin": ONE})
    wanted = source(f"s3://{bucket.name}", **with_secret("s3-keys"))
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0) as mirror:
        first = await mirror.ready(wanted)
        rot(tmp_path / "mirror/store/chunks" / digest_of(ONE).fanout, "flipped")
        other = bytes([ONE[0] ^ 1]) + ONE[1:]
        bucket.put({"one.bin": other})
        found = await mirror.verify()
        (item,) = found["items"]
        assert (found["status"], item["outcome"]) == ("DAMAGED", "lost")
        assert "is not what was mirrored any more" in item["reason"]
        (item,) = (await mirror.verify("another"))["items"]
        assert (bucket.name in item["reason"], "another organisation's source" in item["reason"]) == (False, True)
        assert (await mirror.http.get(f"/chunks/{digest_of(ONE)}")).status_code == 503
        second = await mirror.ready(wanted)
        assert second["sources"][0]["manifest"] != first["sources"][0]["manifest"]
        wrong = int(await mirror.tree(second["sources"][0]["manifest"]) != {"one.bin": other})
        bucket.put({"one.bin": ONE})
        assert (await mirror.verify())["status"] == "DONE"
        wrong += await mirror.tree(first["sources"][0]["manifest"]) != {"one.bin": ONE}
    tally.add(scenarios=1, faults=1, repaired=1, refused=1, wrong=wrong)


async def test_a_chunk_that_may_not_be_read_is_repaired_and_the_scrub_goes_on(store: Store, tally: Tally) -> None:
    await until(lambda: store.mirror.rows("scrubs")["scrubs"])
    store.hub.log.clear()
    with not_permitted({store.path("middle")}):
        store.clock.now += PERIOD
        await _until_scrubbed(store)
        await until(lambda: not store.mirror.count("damaged_chunks"))
        assert store.contents_read() == len(MIDDLE)
        assert await store.mirror.metric("bdn_mirror_repaired_chunks_total") == 1
        tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


async def test_a_chunk_that_nobody_may_touch_keeps_nobody_from_the_rest(store: Store, tally: Tally) -> None:
    await until(lambda: store.mirror.rows("scrubs")["scrubs"])
    with not_permitted({store.path("middle")}, also_moving=True):
        store.clock.now += PERIOD
        await _until_scrubbed(store)
        assert (await store.mirror.http.get(f"/chunks/{digest_of(MIDDLE)}")).status_code == 503
        found = await store.mirror.verify()
        (item,) = found["items"]
        assert (found["status"], item["outcome"]) == ("DAMAGED", "lost")
        assert "it cannot be read (Permission denied)" in item["reason"]
        tally.add(scenarios=2, faults=1, refused=1)
    store.clock.now += AGAIN_SECONDS
    await until(lambda: not store.mirror.count("damaged_chunks"))
    tally.add(repaired=1, wrong=not await store.is_right())


@pytest.mark.parametrize("above", [0, 1], ids=["folder", "folder above"])
async def test_a_folder_that_the_disk_has_made_a_file_of_costs_what_was_in_it_and_keeps_nobody_from_anything_else(
    store: Store, tmp_path: Path, above: int, tally: Tally
) -> None:
    await until(lambda: store.mirror.rows("scrubs")["scrubs"])
    broken = store.path("middle").parents[above]
    assert broken not in (*store.path("one").parents, *store.path("slab").parents)
    broken.rename(tmp_path / "folder")
    broken.touch()
    store.rot("flipped", "one")
    store.clock.now += PERIOD
    await _until_scrubbed(store)
    assert (await store.mirror.http.get(f"/chunks/{digest_of(MIDDLE)}")).status_code == 503
    found = await store.mirror.verify()
    (item,) = found["items"]
    assert (found["status"], item["outcome"], item["chunk"]) == ("DAMAGED", "lost", str(digest_of(MIDDLE)))
    assert "it cannot be read (Not a directory)" in item["reason"]
    other = {"other.bin": noise(2_000_000, 7)}
    store.hub.repo("org/other").commit(other)
    document = await store.mirror.ready(source("hf://org/other"))
    tally.add(scenarios=2, faults=2, refused=1, wrong=await store.mirror.tree(manifest_of(document)) != other)
    broken.unlink()
    store.clock.now += AGAIN_SECONDS
    await until(lambda: not store.mirror.count("damaged_chunks"))
    tally.add(repaired=2, wrong=not await store.is_right())


async def test_a_lost_chunk_stops_no_other_mirror(store: Store, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    name = store.rot("flipped", "middle")
    await store.mirror.verify(repair=False)
    fault = DirectoryStore.fault

    def stale(self: DirectoryStore, digest: Digest) -> str | None:
        if digest == name:
            raise StoreUnavailableError("Stale file handle")
        return fault(self, digest)

    other = {"other.bin": noise(2_000_000, 7)}
    store.hub.repo("org/other").commit(other)
    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "fault", stale)
        document = await store.mirror.ready(source("hf://org/other"))
        tally.add(scenarios=1, faults=1, wrong=await store.mirror.tree(manifest_of(document)) != other)
        assert store.mirror.count("damaged_chunks") == 1
    await store.mirror.ready(MODEL)
    tally.add(repaired=1, wrong=not await store.is_right() or store.mirror.count("damaged_chunks"))


def manifest_of(document: Json) -> str:
    return str(document["sources"][0]["manifest"])


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
    assert not store.mirror.count("damaged_chunks")
    tally.add(scenarios=1, faults=1, repaired=1, wrong=not await store.is_right())


# --- Manifests and chunk lists are in the mirror's database alone: damaged there, they are found, refused, and named ---
RECORDED_LARGE: Final = noise(CHUNK_SIZE + 12345, 7)
RECORDED_ONE: Final = noise(3_000_000, 8)
RECORDED: Final = {"model.safetensors": RECORDED_LARGE, "one.bin": RECORDED_ONE, "small.txt": b"small"}
LARGE_NAME: Final = FileLayout.of(
    len(RECORDED_LARGE), (digest_of(RECORDED_LARGE[:CHUNK_SIZE]), digest_of(RECORDED_LARGE[CHUNK_SIZE:]))
).digest
RECORDS: Final = ("manifest", "large", "one")
RECORD_DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "flipped": lambda raw: raw[:9] + bytes([raw[9] ^ 0x10]) + raw[10:],
    "truncated": lambda raw: raw[: len(raw) // 3],
    "zeroed": lambda raw: bytes(len(raw)),
}


@dataclass
class Records:
    """A mirror that holds ``RECORDED``, and the file under its database."""

    mirror: MirrorUnderTest
    clock: Clock
    manifest: str

    @asynccontextmanager
    async def damaged(self, place: str, how: str) -> AsyncIterator[Digest]:
        """The disk changes a record; at the end somebody restores it. Yields the record's name."""
        table, column, name = {
            "manifest": ("manifests", "canonical", Digest.parse(self.manifest)),
            "large": ("contents", "chunks", LARGE_NAME),
            "one": ("contents", "chunks", digest_of(RECORDED_ONE)),
        }[place]

        def write(change: Callable[[bytes], bytes]) -> bytes:
            with closing(sqlite3.connect(self.mirror.data_dir / "mirror.sqlite")) as database:
                found = database.execute(f"SELECT {column} FROM {table} WHERE digest = ?", (name.hex,)).fetchone()
                right = bytes(found[0]) if found else b""
                database.execute(f"UPDATE {table} SET {column} = ? WHERE digest = ?", (change(right), name.hex))
                database.commit()
                return right

        right = await asyncio.to_thread(write, RECORD_DAMAGES[how])  # the mirror may be writing
        yield name
        await asyncio.to_thread(write, lambda _: right)

    async def counted(self) -> float:
        return await self.mirror.metric("bdn_mirror_damaged_records")

    async def check_all_is_right(self) -> None:
        assert (await self.mirror.verify())["items"] == []
        assert await self.counted() == 0
        assert await self.mirror.tree(self.manifest) == RECORDED


@pytest.fixture
async def records(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[Records]:
    hub.repo("org/model").commit(RECORDED)
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=PERIOD, collect_seconds=0) as mirror:
        document = await mirror.ready(MODEL)
        yield Records(mirror, clock, document["sources"][0]["manifest"])


async def test_the_scrub_finds_a_damaged_record_within_its_period(records: Records, tally: Tally) -> None:
    await until(lambda: records.mirror.rows("scrubs")["scrubs"])
    for place, how in zip(RECORDS, RECORD_DAMAGES, strict=True):
        async with records.damaged(place, how) as name:
            records.clock.now += PERIOD
            async with asyncio.timeout(LONGEST_SECONDS):
                while not await records.counted():  # noqa: ASYNC110 - a page of metrics tells nobody of its changes
                    await asyncio.sleep(0.05)
            asked = {"manifest": records.manifest}
            events = (await records.mirror.http.get("/events", params=asked)).json()["items"]
            assert str(name) in [event["digest"] for event in events if event["kind"] == "damaged"], (place, how)
        await records.check_all_is_right()
        assert records.mirror.count("damaged_chunks") == 0, "chunks are not blamed for what a record says of them"
        tally.add(scenarios=1, faults=1)


async def test_a_damaged_record_is_refused_and_a_verification_names_it(records: Records, tally: Tally) -> None:
    for place, how in product(RECORDS, RECORD_DAMAGES):
        async with records.damaged(place, how) as name:
            path = f"/manifests/{records.manifest}" + ("" if place == "manifest" else "/layout")
            refusal = await records.mirror.http.get(path)
            error = refusal.json()["error"]
            assert (refusal.status_code, error["code"]) == (503, "STORE_UNAVAILABLE"), place
            assert str(name) in error["message"]
            assert "backup" in error["message"]
            assert await records.counted() == 1
            for selected in ({}, {"manifest": records.manifest}, {"source": "hf://org/model"}):
                verified = await records.mirror.verify(**selected)
                [item] = verified["items"]
                assert (verified["status"], item["outcome"], item["chunk"]) == ("DAMAGED", "damaged", str(name))
                assert item["manifest"] == (records.manifest if place != "one" or item["manifest"] else None)
        await records.check_all_is_right()
        tally.add(scenarios=1, faults=1, refused=1)


async def test_no_chunk_is_collected_while_a_record_is_damaged_that_may_need_it(records: Records, tally: Tally) -> None:
    chunks = records.mirror.chunks()
    for place, how in (("one", "zeroed"), ("large", "truncated")):
        async with records.damaged(place, how):
            records.clock.now += 3600
            for request in ({}, {"dry_run": True}):
                asked = {"grace_seconds": 0, **request}
                refusal = await records.mirror.http.post("/collections", params={"wait": LONGEST_SECONDS}, json=asked)
                refused = refusal.json()
                assert refused["status"] == "FAILED"
                assert "which chunks it needs" in refused["error"]["message"]
            assert await records.counted() == 1
        await records.mirror.collect(grace_seconds=0)
        assert records.mirror.chunks() == chunks
        await records.check_all_is_right()
        tally.add(scenarios=1, faults=1, refused=1)


async def test_a_damaged_record_without_backup_is_evicted_and_mirrored_again(records: Records, tally: Tally) -> None:
    for place in RECORDS:
        async with records.damaged(place, "truncated"):
            assert (await records.mirror.evict(manifest=records.manifest, tier="mirror"))["status"] == "DONE"
            records.clock.now += 30 * PERIOD
            await records.mirror.collect(grace_seconds=0)
            await records.mirror.ready(MODEL)
            await records.check_all_is_right()
            tally.add(scenarios=1, faults=1)
