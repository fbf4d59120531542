"""Manifests and chunk lists rest in the mirror's database alone: damaged there, they are found, kept, and written right again."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import Digest, digest_of
from bdn.core.store.layout import FileLayout
from bdn.mirror.scrub.repair import AGAIN_SECONDS
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository
from tests.support.agent.rig import Clock, noise
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, source, until
from tests.support.promises.tally import Tally
from tests.support.services import services
from tests.support.services.commands import wait_until

pytestmark = pytest.mark.promise("corruption")
pytest_plugins = ("tests.support.mirror.fixtures",)

PERIOD: Final = 7 * 24 * 3600.0
LARGE: Final = noise(CHUNK_SIZE + 12345, 7)
ONE: Final = noise(3_000_000, 8)
TREE: Final = {"model.safetensors": LARGE, "one.bin": ONE, "small.txt": b"small"}
MODEL: Final = source("hf://org/model")
PARTS: Final = (LARGE[:CHUNK_SIZE], LARGE[CHUNK_SIZE:])
LARGE_NAME: Final = FileLayout.of(len(LARGE), tuple(map(digest_of, PARTS))).digest

PLACES: Final = ("manifest", "large", "one")
SOME: Final = [("manifest", "truncated"), ("large", "flipped"), ("one", "zeroed")]
FULL: Final = os.environ.get("BDN_FAULT") == "full"
HOW: Final[dict[str, Callable[[bytes], bytes]]] = {
    "flipped": lambda raw: raw[:9] + bytes([raw[9] ^ 0x10]) + raw[10:],
    "truncated": lambda raw: raw[: len(raw) // 3],
    "zeroed": lambda raw: bytes(len(raw)),
}


def damage(data_dir: Path, manifest: str, place: str, how: str) -> None:
    """From now on the database says something else."""
    table, column, name = {
        "manifest": ("manifests", "canonical", Digest.parse(manifest)),
        "large": ("contents", "chunks", LARGE_NAME),
        "one": ("contents", "chunks", digest_of(ONE)),
    }[place]
    with closing(sqlite3.connect(data_dir / "mirror.sqlite")) as database:
        [[raw]] = database.execute(f"SELECT {column} FROM {table} WHERE digest = ?", (name.hex,))
        database.execute(f"UPDATE {table} SET {column} = ? WHERE digest = ?", (HOW[how](raw), name.hex))
        database.commit()


@dataclass
class Records:
    """A mirror that holds ``TREE``, and the file under its database."""

    mirror: MirrorUnderTest
    clock: Clock
    hub: Hub
    repository: HubRepository
    manifest: str

    async def damage(self, place: str, how: str) -> None:
        """The disk changes a record."""
        self.hub.log.clear()
        await asyncio.to_thread(damage, self.mirror.data_dir, self.manifest, place, how)  # the mirror may be writing

    async def verify(self, **request: object) -> Json:
        answer = await self.mirror.http.post("/verifications", params={"wait": LONGEST_SECONDS}, json=request)
        assert answer.json()["status"] != "RUNNING", answer.text
        return dict(answer.json())

    async def collect(self, **request: object) -> Json:
        asked = {"grace_seconds": 0, **request}
        answer = await self.mirror.http.post("/collections", params={"wait": LONGEST_SECONDS}, json=asked)
        return dict(answer.json())

    async def metric(self, name: str) -> float:
        text = (await self.mirror.http.get("/metrics")).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))

    def contents_read(self) -> int:
        """Bytes of files that the upstream sent since the last damage."""
        asked = [one for one in self.hub.log.find() if one.status in (200, 206)]
        return sum(one.bytes_served for one in asked if "/api/models" not in one.target)


@pytest.fixture
async def records(upstreams: None, hub: Hub, tmp_path: Path) -> AsyncIterator[Records]:
    repository = hub.repo("org/model")
    repository.commit(TREE)
    clock = Clock()
    async with mirror_under_test(tmp_path / "mirror", clock=clock, scrub_seconds=PERIOD, collect_seconds=0) as mirror:
        document = await mirror.ready(MODEL)
        found = Records(mirror, clock, hub, repository, document["sources"][0]["manifest"])
        assert (await found.verify(all=True))["items"] == []
        yield found


@pytest.mark.parametrize(("place", "how"), list(product(PLACES, HOW)) if FULL else SOME)
async def test_the_scrub_finds_a_damaged_record_within_its_period_and_writes_it_right_again(
    records: Records, place: str, how: str, tally: Tally
) -> None:
    await until(lambda: records.mirror.rows("scrubs")["scrubs"])
    kept = records.mirror.count("quarantined_files")
    await records.damage(place, how)
    records.clock.now += PERIOD
    async with asyncio.timeout(LONGEST_SECONDS):
        while await records.metric("bdn_mirror_repaired_records_total") < 1:
            pass

    found = await records.mirror.tree(records.manifest)
    tally.add(scenarios=1, faults=1, repaired=1, wrong=found != TREE)
    assert found == TREE
    assert await records.metric("bdn_mirror_damaged_records") == 0
    assert records.mirror.count("damaged_chunks") == 0, "chunks are not blamed for what a record says of them"
    assert records.mirror.count("quarantined_files") == kept + 1
    # Of a large file the one chunk is read whose name was lost; where all names were, all of it.
    lost = {"flipped": len(PARTS[0]), "truncated": len(LARGE), "zeroed": len(LARGE)}[how] if place == "large" else 0
    assert records.contents_read() == lost


@pytest.mark.parametrize("place", PLACES if FULL else ["large"])
async def test_a_verification_finds_a_damaged_record_and_only_looks_when_that_was_asked(
    records: Records, place: str, tally: Tally
) -> None:
    await records.damage(place, "flipped")
    for request in ({"all": True}, {"manifest": records.manifest}):
        looked = await records.verify(**request, repair=False)
        assert (looked["status"], [item["outcome"] for item in looked["items"]]) == ("DAMAGED", ["damaged"])
        assert await records.metric("bdn_mirror_damaged_records") == 1
    verified = await records.verify(source="hf://org/model")
    [item] = verified["items"]
    assert (verified["status"], item["outcome"], item["manifest"]) == ("DONE", "repaired", records.manifest)
    tally.add(scenarios=2, faults=1, repaired=1, wrong=await records.mirror.tree(records.manifest) != TREE)
    assert (await records.verify(all=True))["items"] == []


@pytest.mark.parametrize("place", ["manifest", "large"])
async def test_who_reads_a_damaged_record_is_refused_until_it_is_repaired_and_nobody_gets_it(
    records: Records, place: str, tally: Tally
) -> None:
    records.repository.disabled = True
    await records.damage(place, "zeroed")
    path = f"/manifests/{records.manifest}" + ("" if place == "manifest" else "/layout")
    refusal = await records.mirror.http.get(path)
    error = refusal.json()["error"]
    lost = await records.verify(all=True)

    assert (refusal.status_code, error["code"]) == (503, "STORE_UNAVAILABLE")
    assert "damaged in the mirror's database" in error["message"]
    assert (lost["status"], [item["outcome"] for item in lost["items"]]) == ("DAMAGED", ["lost"])
    assert records.mirror.count("quarantined_files") == 1, "evidence is kept once, however often it is tried"
    records.repository.disabled = False
    records.clock.now += AGAIN_SECONDS
    async with asyncio.timeout(LONGEST_SECONDS):
        while await records.metric("bdn_mirror_damaged_records"):
            pass
    tally.add(scenarios=1, faults=2, refused=1, repaired=1, wrong=await records.mirror.tree(records.manifest) != TREE)


@pytest.mark.parametrize(("place", "how"), [("one", "zeroed"), ("large", "truncated")])
async def test_no_chunk_is_collected_while_a_record_is_damaged_that_may_need_it(
    records: Records, place: str, how: str, tally: Tally
) -> None:
    records.repository.disabled = True
    await records.damage(place, how)
    records.clock.now += 3600

    refused = await records.collect()
    again = await records.collect(dry_run=True) if place == "large" else refused  # the other is repaired from itself

    assert (refused["status"], again["status"]) == ("FAILED", "FAILED")
    assert "which chunks it needs" in refused["error"]["message"]
    records.repository.disabled = False
    records.clock.now += AGAIN_SECONDS
    async with asyncio.timeout(LONGEST_SECONDS):
        while await records.metric("bdn_mirror_damaged_records"):
            pass
    assert (await records.collect())["status"] == "DONE"
    assert records.contents_read() == (len(LARGE) if place == "large" else 0), "the record, and no chunk"
    wrong = await records.mirror.tree(records.manifest) != TREE
    tally.add(scenarios=1, faults=1, refused=1, repaired=1, wrong=wrong)
    assert not wrong


def test_a_record_that_an_agent_holds_is_asked_of_it_and_not_of_the_upstream(
    hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    hub.repo("org/model").commit(TREE)
    environment = {"HF_ENDPOINT": hub.url, "BDN_SCRUB_SECONDS": "0"}
    with (
        services.mirror(tmp_path / "mirror", **environment) as mirror,
        services.agent(tmp_path / "agent", mirror.url) as agent,
    ):
        document = mirror.ready("hf://org/model")
        agent.stage(document["grant"], "job")
        holds = lambda: mirror.http.get("/agents").json()["items"][0]["manifests"] == 1  # noqa: E731
        wait_until(holds, seconds=60, what="the agent's holdings")
        hub.log.clear()
        manifest = document["sources"][0]["manifest"]
        for place in ("manifest", "large"):
            damage(mirror.shell.data, manifest, place, "zeroed")
            asked = {"all": True, "tier": "mirror"}
            answer = mirror.http.post("/verifications", params={"wait": LONGEST_SECONDS}, json=asked).json()
            assert (answer["status"], [item["outcome"] for item in answer["items"]]) == ("DONE", ["repaired"]), answer
        assert hub.log.count() == 0
        assert mirror.http.get(f"/manifests/{manifest}").status_code == 200
        assert mirror.http.get(f"/manifests/{manifest}/layout").status_code == 200
        tally.add(scenarios=2, faults=2, repaired=2)
