"""Manifests and chunk lists are in the mirror's database alone: damaged there, they are found, refused, and named."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of
from bdn.core.store import FileLayout
from tests.doubles.hub import Hub
from tests.support.agent.rig import Clock, noise
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, source, until
from tests.support.promises.tally import Tally

pytestmark = pytest.mark.promise("corruption")
pytest_plugins = ("tests.support.mirror.fixtures",)

PERIOD: Final = 7 * 24 * 3600.0
LARGE: Final = noise(CHUNK_SIZE + 12345, 7)
ONE: Final = noise(3_000_000, 8)
TREE: Final = {"model.safetensors": LARGE, "one.bin": ONE, "small.txt": b"small"}
MODEL: Final = source("hf://org/model")
LARGE_NAME: Final = FileLayout.of(len(LARGE), (digest_of(LARGE[:CHUNK_SIZE]), digest_of(LARGE[CHUNK_SIZE:]))).digest
PLACES: Final = ("manifest", "large", "one")
HOW: Final[dict[str, Callable[[bytes], bytes]]] = {
    "flipped": lambda raw: raw[:9] + bytes([raw[9] ^ 0x10]) + raw[10:],
    "truncated": lambda raw: raw[: len(raw) // 3],
    "zeroed": lambda raw: bytes(len(raw)),
}


@dataclass
class Records:
    """A mirror that holds ``TREE``, and the file under its database."""

    mirror: MirrorUnderTest
    clock: Clock
    manifest: str

    @asynccontextmanager
    async def damaged(self, place: str, how: str) -> AsyncIterator[Digest]:
        """The disk changes a record; at the end somebody restores it. Yields the record's name."""
        table, column, name = {
            "manifest": ("manifests", "canonical", Digest.parse(self.manifest)),
            "large": ("contents", "chunks", LARGE_NAME),
            "one": ("contents", "chunks", digest_of(ONE)),
        }[place]

        def write(change: Callable[[bytes], bytes]) -> bytes:
            with closing(sqlite3.connect(self.mirror.data_dir / "mirror.sqlite")) as database:
                found = database.execute(f"SELECT {column} FROM {table} WHERE digest = ?", (name.hex,)).fetchone()
                right = bytes(found[0]) if found else b""
                database.execute(f"UPDATE {table} SET {column} = ? WHERE digest = ?", (change(right), name.hex))
                database.commit()
                return right

        right = await asyncio.to_thread(write, HOW[how])  # the mirror may be writing
        yield name
        await asyncio.to_thread(write, lambda _: right)

    async def verify(self, **request: object) -> Json:
        answer = await self.mirror.http.post("/verifications", params={"wait": LONGEST_SECONDS}, json=request)
        assert answer.json()["status"] != "RUNNING", answer.text
        return dict(answer.json())

    async def collect(self, **request: object) -> Json:
        asked = {"grace_seconds": 0, **request}
        answer = await self.mirror.http.post("/collections", params={"wait": LONGEST_SECONDS}, json=asked)
        return dict(answer.json())

    async def counted(self) -> float:
        text = (await self.mirror.http.get("/metrics")).text
        return next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("bdn_mirror_damaged_records ")
        )

    async def check_all_is_right(self) -> None:
        assert (await self.verify(all=True))["items"] == []
        assert await self.counted() == 0
        assert await self.mirror.tree(self.manifest) == TREE


@pytest.fixture
async def records(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[Records]:
    hub.repo("org/model").commit(TREE)
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=PERIOD, collect_seconds=0) as mirror:
        document = await mirror.ready(MODEL)
        yield Records(mirror, clock, document["sources"][0]["manifest"])


async def test_the_scrub_finds_a_damaged_record_within_its_period(records: Records, tally: Tally) -> None:
    await until(lambda: records.mirror.rows("scrubs")["scrubs"])
    for place, how in zip(PLACES, HOW, strict=True):
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


async def test_who_reads_a_damaged_record_is_refused_and_a_verification_names_it(
    records: Records, tally: Tally
) -> None:
    for place, how in product(PLACES, HOW):
        async with records.damaged(place, how) as name:
            path = f"/manifests/{records.manifest}" + ("" if place == "manifest" else "/layout")
            refusal = await records.mirror.http.get(path)
            error = refusal.json()["error"]
            assert (refusal.status_code, error["code"]) == (503, "STORE_UNAVAILABLE"), place
            assert str(name) in error["message"]
            assert "backup" in error["message"]
            assert await records.counted() == 1
            for selected in ({"all": True}, {"manifest": records.manifest}, {"source": "hf://org/model"}):
                verified = await records.verify(**selected)
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
                refused = await records.collect(**request)
                assert refused["status"] == "FAILED"
                assert "which chunks it needs" in refused["error"]["message"]
            assert await records.counted() == 1
        assert (await records.collect())["status"] == "DONE"
        assert records.mirror.chunks() == chunks
        await records.check_all_is_right()
        tally.add(scenarios=1, faults=1, refused=1)


async def test_without_a_backup_what_has_a_damaged_record_is_evicted_collected_and_mirrored_again(
    records: Records, tally: Tally
) -> None:
    for place in PLACES:
        async with records.damaged(place, "truncated"):
            assert (await records.mirror.evict(manifest=records.manifest, tier="mirror"))["status"] == "DONE"
            records.clock.now += 30 * PERIOD
            await records.mirror.collect(grace_seconds=0)
            await records.mirror.ready(MODEL)
            await records.check_all_is_right()
            tally.add(scenarios=1, faults=1)
