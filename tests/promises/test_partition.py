"""The mirror's store is out of reach or fails: what can be done is done, the rest says so and goes on later."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from bdn.mirror.db import chunks
from bdn.mirror.upkeep import scrub
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.crash.forgetful_disk import ForgetfulDisk, needs_forgetful_disks
from tests.support.mirror.service import Json, MirrorUnderTest, mirror_under_test, source
from tests.support.promises.tally import Tally

pytest_plugins = ("tests.support.mirror.fixtures",)
pytestmark = [
    pytest.mark.promise("network"),
    pytest.mark.usefixtures("backend"),
    pytest.mark.embedded("it is the disk under the directory that fails"),
]
MODEL: Final = source("hf://org/model")


# --- The disk under the mirror's store fails, or refuses: whoever needs it is told so, and what it held and had to lose is not forgotten ---
LONGEST_SECONDS: Final = 60.0
STORED: Final = {"w.bin": noise(9 * MIB + 1, 2), "config.json": b"{}"}
OTHERS: Final = {"o.bin": noise(MIB, 2)}
OTHER: Final = source("hf://org/other")
STEPS: Final = [
    ("unlink", "store/chunks/*", errno.EACCES),
    ("fsyncdir", "store/chunks/*", errno.EIO),
    ("create", "store/incoming/*", errno.EACCES),
    ("write", "store/incoming/*", errno.EIO),
    ("fsync", "store/incoming/*", errno.EIO),
    ("rename", "store/incoming*", errno.EROFS),
]


@pytest.fixture
async def mirror(upstreams: None, hub: Hub, disk: ForgetfulDisk, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """Its database is elsewhere; what is evicted is to go at once."""
    hub.repo("org/model").commit(STORED)
    hub.repo("org/other").commit(OTHERS)
    settings: Json = {"store": f"file://{disk.place / 'store'}", "tombstone_seconds": 0}
    async with mirror_under_test(tmp_path / "mirror", **settings) as mirror:
        yield mirror


def files(disk: ForgetfulDisk) -> list[Path]:
    """All of the store but its evidence and its owner."""
    found = (path for path in (disk.place / "store").rglob("*") if path.is_file())
    return [path for path in found if path.parent.name != "quarantine" and path.name != "owner"]


def size(disk: ForgetfulDisk) -> int:
    return sum(path.stat().st_size for path in files(disk))


def switch_off(disk: ForgetfulDisk) -> None:
    """From now on every call answers EIO."""
    disk.fail_at(1, [])
    with pytest.raises(OSError, match="Input/output"):
        (disk.place / "anything").touch()


def check_away(error: Any) -> None:
    assert (error["code"], error["retryable"]) == ("STORE_UNAVAILABLE", True), error
    assert "store" in error["message"]


@needs_forgetful_disks
@pytest.mark.parametrize(("kind", "path", "number"), STEPS[2:], ids=[kind for kind, *_ in STEPS[2:]])
async def test_a_copy_that_the_disk_refuses_is_typed_and_goes_on_when_it_does_not(
    disk: ForgetfulDisk, mirror: MirrorUnderTest, kind: str, path: str, number: int, tally: Tally
) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        disk.refuse(kind, path, number=number)
        error = await mirror.failed(MODEL)
        met = disk.faults_met
        disk.mend()
        found = await mirror.tree(await mirror.manifest(MODEL))

        tally.add(scenarios=1, faults=met, refused=1, wrong=found != STORED)
        check_away(error)
        assert os.strerror(number) in error["message"]


@needs_forgetful_disks
async def test_a_store_that_is_away_is_named_to_everybody(
    disk: ForgetfulDisk, mirror: MirrorUnderTest, tally: Tally
) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        manifest = await mirror.manifest(MODEL)
        file, kept = (await mirror.files(manifest))["w.bin"], size(disk)
        victim = await mirror.manifest(OTHER)
        before, of_victim = len(files(disk)), size(disk) - kept
        switch_off(disk)
        answers = [
            await mirror.http.get("/readyz"),
            await mirror.http.get(f"/chunks/{file.layout.fetched[0]}"),
            await mirror.http.post("/evictions", json={"manifest": victim, "tier": "mirror"}),
        ]
        asked = await mirror.http.post("/collections", params={"wait": 20}, json={"grace_seconds": 0})
        disk.lose_power("kept")
        is_ready = (await mirror.http.get("/readyz")).is_success
        found = await mirror.tree(manifest)
        collected = await mirror.collect()
        back = await mirror.tree(await mirror.manifest(OTHER))

        tally.add(scenarios=5, faults=1, refused=4, wrong=(found != STORED) + (back != OTHERS), lost=not is_ready)
        for answer in answers:
            assert answer.status_code == 503
            check_away(answer.json()["error"])
        assert asked.json()["status"] == "FAILED"
        check_away(asked.json()["error"])
        assert collected["bytes_freed"] == of_victim, "it was evicted while the store was away"
        assert len(files(disk)) == before


@needs_forgetful_disks
async def test_a_verification_of_a_store_that_is_away_calls_nothing_damaged_and_goes_on_when_it_is_back(
    disk: ForgetfulDisk, mirror: MirrorUnderTest, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        monkeypatch.setattr(scrub, "_AWAY_SECONDS", 0.01)
        manifest = await mirror.manifest(MODEL)
        switch_off(disk)
        begun = (await mirror.http.post("/verifications", params={"wait": 1}, json={"all": True})).json()
        damaged = mirror.damaged()
        disk.lose_power("kept")
        ended = await mirror.http.get(f"/verifications/{begun['id']}", params={"wait": LONGEST_SECONDS})
        found = await mirror.tree(manifest)

        tally.add(scenarios=1, faults=1, refused=1, wrong=found != STORED, lost=damaged)
        assert begun["status"] == "RUNNING"
        assert (ended.json()["status"], ended.json()["items"]) == ("DONE", [])


@needs_forgetful_disks
@pytest.mark.parametrize(("kind", "path", "number"), STEPS[:2], ids=["unlink", "sync"])
async def test_an_eviction_that_the_disk_refuses_is_made_up_for_by_a_later_collection(
    disk: ForgetfulDisk,
    mirror: MirrorUnderTest,
    kind: str,
    path: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        manifest = await mirror.manifest(OTHER)
        disk.refuse(kind, path, number=number)
        refused = await mirror.http.post("/evictions", json={"manifest": manifest, "tier": "mirror"})
        met = disk.faults_met
        disk.mend()
        gone = await mirror.http.get(f"/manifests/{manifest}")
        monkeypatch.setattr(chunks, "DELETE_SECONDS", 0.0)  # as if what was refused had expired
        await mirror.collect(grace_seconds=0)

        tally.add(scenarios=1, faults=met, refused=1, lost=len(files(disk)))
        assert met
        check_away(refused.json()["error"])
        assert gone.status_code == 404
        assert not mirror.count("chunks"), "all may be mirrored again"
