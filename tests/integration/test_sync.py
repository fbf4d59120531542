"""A syncer beside a job that writes, against a mirror that serves: what settles is pushed whole, what changes is not seen."""

import asyncio
import errno
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import ByteRange
from bdn.core.errors import BdnError, DiskFailedError
from bdn.core.pace.retry import RetryPolicy
from bdn.core.source.uri import CheckpointUri
from bdn.core.training.checkpoints import LONGEST_READ
from bdn.core.training.settling import Stamp
from bdn.disk.durable import opened, sync_folder
from bdn.disk.syscalls import birth_time
from bdn.net.api_clients import MirrorClient
from bdn.net.client import OutageRetry
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.byte_threads import ByteThreads
from node_agent.job.journal import Committed, VolumeJournal
from node_agent.job.pushing import Pusher
from node_agent.job.syncing import Syncer, checkpoints_in
from node_agent.job.tree import ChangedError, JobDirectory, OpenFile
from tests.support.content.noise import MIB, noise
from tests.support.crash.forgetful_disk import Way, forgetful_disk, needs_forgetful_disks
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import LONGEST_SECONDS, until

pytest_plugins = ("tests.support.mirror.fixtures",)
JOB = CheckpointUri("llama", "job1")
BIG = noise(17 * MIB + 3, 1)
LONG = 1_000_000.0  # seconds: what has not come by a rename never settles


class Reading(JobDirectory):
    """A job's directory, of which a test sees what is read, and may do something in that moment."""

    def __init__(self, root: Path, during: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(root, 1000)
        object.__setattr__(self, "reads", [])
        object.__setattr__(self, "during", during)

    reads: list[str]
    during: Callable[[str], None]

    @contextmanager
    def opened(self, path: str, stamp: Stamp) -> Iterator[OpenFile]:
        self.reads.append(path)
        self.during(path)
        with super().opened(path, stamp) as file:
            yield file

    def read_part(self, path: str, stamp: Stamp, part: ByteRange) -> bytearray | None:
        """Headers and indexes, which are not counted."""
        return JobDirectory(self.root).read_part(path, stamp, part)


@asynccontextmanager
async def syncing(
    mirror: ServingProcess,
    directory: JobDirectory,
    journal: Path,
    settle_seconds: float = LONG,
    pace: Callable[[int], float] | None = None,
    *,
    is_noting: bool = False,
    outages: OutageRetry | None = None,
) -> AsyncIterator[Syncer]:
    with (
        closing(ByteThreads(2, "naming")) as namers,
        closing(ByteThreads(4, "push")) as senders,
        closing(ConnectionPool(timeout_seconds=60)) as pool,
        VolumeJournal(journal) as kept,
    ):
        async with MirrorClient(mirror.url, None) as client:
            pusher = Pusher(client, pool, namers, senders, outages=outages or OutageRetry(), pace=pace)
            yield Syncer(directory, JOB, pusher, kept, lambda *_: None, settle_seconds, is_noting)


@asynccontextmanager
async def in_background(syncer: Syncer) -> AsyncIterator[None]:
    task = asyncio.create_task(syncer.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def checkpoints(mirror: ServingProcess) -> dict[str, Any]:
    items = (await mirror.http.get("/checkpoints")).json()["items"]
    return {item["checkpoint_id"]: item for item in items}


async def seen(mirror: ServingProcess, *names: str) -> dict[str, Any]:
    """All checkpoints, once these are there."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while not set(names) <= (found := await checkpoints(mirror)).keys():  # noqa: ASYNC110 - others' rows
            await asyncio.sleep(0.1)
    return found


@pytest.fixture
async def mirror(upstreams: None, tmp_path: Path) -> AsyncIterator[ServingProcess]:
    async with await ServingProcess.start(tmp_path / "mirror") as mirror:
        yield mirror


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


async def test_what_was_renamed_is_pushed_at_once_and_what_rests_is_only_sent_ahead(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    with opened(folder, os.O_RDONLY) as descriptor:
        if birth_time(descriptor) is None:
            pytest.skip("this file system keeps no birth times: a rename is not told from a new folder")
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer, in_background(syncer):
        (folder / "tmp-1").mkdir()
        (folder / "tmp-1/model.safetensors").write_bytes(BIG)
        (folder / "resting").mkdir()
        (folder / "resting/x").write_bytes(bytes(2_000_000))
        await until(lambda: mirror.query("SELECT 1 FROM chunks WHERE size = 2000000"))  # x has rested, and is sent
        assert await checkpoints(mirror) == {}
        (folder / "tmp-1").rename(folder / "checkpoint-1")
        found = await seen(mirror, "checkpoint-1")
    assert found.keys() == {"checkpoint-1"}
    assert found["checkpoint-1"]["size_bytes"] == len(BIG)


async def test_what_was_sent_ahead_is_not_read_again_when_it_settles(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a/model.safetensors").write_bytes(BIG)
    directory = Reading(folder)
    async with syncing(mirror, directory, tmp_path / "journal", settle_seconds=8) as syncer, in_background(syncer):
        await seen(mirror, "a")
    assert sorted(directory.reads) == ["a/model.safetensors"] * 6  # three chunks, each to be named and to be sent


async def test_a_syncer_that_starts_again_reads_and_sends_nothing_twice(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a/model.safetensors").write_bytes(BIG)
    for reads in (6, 0):
        directory = Reading(folder)
        async with syncing(mirror, directory, tmp_path / "journal") as syncer:
            assert await syncer.run_once() == []
        assert len(directory.reads) == reads
    assert mirror.query("SELECT count(*) FROM mirrors") == [(1,)]


async def test_a_checkpoint_that_the_mirror_has_lost_is_pushed_again_before_a_last_sync_ends(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    for name in ("kept", "lost"):
        (folder / name).mkdir()
        (folder / name / "model.bin").write_bytes(name.encode())
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == []
    found = await checkpoints(mirror)
    await mirror.http.delete(f"/checkpoints/{found['lost']['id']}")  # as a database that lost its last commits has it
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == []
    after = await checkpoints(mirror)
    assert after.keys() == {"kept", "lost"}
    assert (after["kept"]["id"], after["lost"]["files"]) == (found["kept"]["id"], 1)


@pytest.mark.parametrize(("at", "size"), [(4e9, 6), (1.0, 5)], ids=["earlier than pushed", "later"])
async def test_checkpoint_of_which_the_mirror_has_another_version__is_pushed_again_if_that_is_an_earlier_one(
    mirror: ServingProcess, folder: Path, tmp_path: Path, at: float, size: int
) -> None:
    """A database that was set back has an earlier one; a job that went on on another node has pushed a later one."""
    (folder / "a").mkdir()
    (folder / "a/model.bin").write_bytes(b"first")
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == []
        (folder / "a/model.bin").write_bytes(b"second")
        (found,) = checkpoints_in(syncer.directory.look()).values()
        syncer.journal.note_commit("a", Committed("mir_second", found.marks(), at))
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == []
    assert (await checkpoints(mirror))["a"]["size_bytes"] == size


async def test_what_changes_while_it_is_pushed_is_not_seen(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    """The job writes on in the moment in which its last file is read: what was sent is no state that the directory ever had."""
    (folder / "a").mkdir()
    (folder / "a/1").write_bytes(b"first")
    (folder / "a/2").write_bytes(b"second")
    changed: list[str] = []

    def change(path: str) -> None:
        if path == "a/2" and not changed:
            (folder / "a/1").write_bytes(b"FIRST, and longer")
            changed.append(path)

    async with syncing(mirror, Reading(folder, change), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == ["a"]
        assert await checkpoints(mirror) == {}
        assert await syncer.run_once() == []
    found = await checkpoints(mirror)
    assert found["a"]["size_bytes"] == len(b"FIRST, and longer") + len(b"second")


async def test_what_is_renamed_while_it_is_pushed_is_pushed_as_what_it_is_then(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a/1").write_bytes(b"first")

    def rename(_: str) -> None:
        if (folder / "a").exists():
            (folder / "a").rename(folder / "b")

    async with syncing(mirror, Reading(folder, rename), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == ["a"]
        assert await syncer.run_once() == []
    assert (await checkpoints(mirror)).keys() == {"b"}


async def test_what_the_job_deletes_stays_and_what_it_writes_again_is_the_next_version(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        for content in (b"one", b"second"):
            (folder / "a").mkdir(exist_ok=True)
            (folder / "a/x").write_bytes(content)
            assert await syncer.run_once() == []
        (folder / "a/x").unlink()
        (folder / "a").rmdir()
        assert await syncer.run_once() == []
    found = await checkpoints(mirror)
    assert {name: item["size_bytes"] for name, item in found.items()} == {"a": len(b"second")}


async def test_what_is_left_of_one_that_the_job_was_deleting_is_no_version(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    """A trainer that rotates is killed between two files. What lies there then is pushed by nobody, and what comes later is."""
    (folder / "a").mkdir()
    for name in ("1", "2"):
        (folder / "a" / name).write_bytes(b"as it was")
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == []
        whole = (await checkpoints(mirror))["a"]["manifest"]
    (folder / "a/1").unlink()
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:  # another one, with its journal
        assert await syncer.run_once() == []
        assert (await checkpoints(mirror))["a"]["manifest"] == whole
        (folder / "a/3").write_bytes(b"a new one")
        assert await syncer.run_once() == []
    assert (await checkpoints(mirror))["a"]["files"] == 2


async def test_while_the_store_is_away_nothing_is_lost_and_nothing_seen(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a/model.safetensors").write_bytes(BIG)
    chunks = tmp_path / "mirror/store/chunks"
    async with syncing(
        mirror,
        Reading(folder),
        tmp_path / "journal",
        outages=OutageRetry(policy=RetryPolicy(outage_seconds=0, attempts=1)),
    ) as syncer:
        away = chunks.rename(tmp_path / "away")
        with pytest.raises(BdnError) as failed:
            await syncer.run_once()
        assert failed.value.code == "STORE_UNAVAILABLE"
        assert await checkpoints(mirror) == {}
        away.rename(chunks)
        assert await syncer.run_once() == []
    assert (await checkpoints(mirror))["a"]["size_bytes"] == len(BIG)


async def test_what_cannot_be_read_holds_up_no_other(mirror: ServingProcess, folder: Path, tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        if path.startswith("a"):
            raise DiskFailedError(path, "the disk says no")

    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x").write_bytes(b"1")
    async with syncing(mirror, Reading(folder, refuse), tmp_path / "journal") as syncer:
        with pytest.raises(DiskFailedError):
            await syncer.run_once()
    assert (await checkpoints(mirror)).keys() == {"b"}


async def test_what_cannot_be_a_checkpoint_is_left_and_holds_up_no_other(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    """Names that no checkpoint can have, a file that is mostly holes, and more indexes than anybody writes."""
    for path in ("a#rank-1/x", "a\nb/x", "b/x", "holes/x", *(f"indexes/{number}.index.json" for number in range(5))):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(b"1")
    os.truncate(folder / "holes/x", 1 << 43)
    for index in (folder / "indexes").iterdir():
        os.truncate(index, LONGEST_READ)
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        syncer.most_bytes = 1 << 30
        assert set(await syncer.run_once()) == {"a#rank-1", "a\nb", "holes", "indexes"}
    assert (await checkpoints(mirror)).keys() == {"b"}


async def test_all_that_is_complete_is_noted_before_any_of_it_is_pushed(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x").write_bytes(b"1")
    outages = OutageRetry(policy=RetryPolicy(outage_seconds=0, attempts=1))
    async with syncing(mirror, Reading(folder), tmp_path / "journal", is_noting=True, outages=outages) as syncer:
        assert await mirror.end(signal.SIGKILL)
        with pytest.raises(BdnError):
            await syncer.run_once()
        assert syncer.journal.settled("a")
        assert syncer.journal.settled("b")


async def test_what_is_beyond_the_quota_is_pushed_once_there_is_room_and_holds_up_no_other(
    upstreams: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_agent.job.syncing.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("node_agent.job.syncing.LOOK_SECONDS", 0.1)
    async with await ServingProcess.start(tmp_path / "mirror", BDN_LIMIT_PUSH_BYTES="10000000") as mirror:
        for name, content in (("a", bytes(8_000_000)), ("b", b"b" * 4_000_000), ("c", b"x")):
            (folder / name).mkdir()
            (folder / name / "x").write_bytes(content)
        async with syncing(mirror, Reading(folder), tmp_path / "once") as syncer:
            with pytest.raises(BdnError) as refused:
                await syncer.run_once()
            assert refused.value.code == "QUOTA_EXCEEDED"
            assert (await checkpoints(mirror)).keys() == {"a", "c"}
        async with syncing(mirror, Reading(folder), tmp_path / "journal", 0.0) as syncer, in_background(syncer):
            first = (await seen(mirror, "a", "c"))["a"]
            await until(lambda: syncer.error is not None)
            assert syncer.error is not None
            assert syncer.error.code == "QUOTA_EXCEEDED"
            assert (await mirror.http.delete(f"/checkpoints/{first['id']}")).status_code == 200
            assert (await seen(mirror, "b", "c")).keys() == {"b", "c"}


async def test_a_directory_whose_scan_takes_an_hour_is_scanned_again_after_the_longest_pause(
    mirror: ServingProcess, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node_agent.job.syncing.LONGEST_PAUSE_SECONDS", 0.1)
    hours = itertools.count()
    async with syncing(mirror, Reading(folder), tmp_path / "journal", 0.0) as syncer:
        syncer.clock = lambda: 3600.0 * next(hours)
        async with in_background(syncer):
            await until(lambda: syncer.unsynced is not None)
            (folder / "a").mkdir()
            (folder / "a/x").write_bytes(b"1")
            assert (await seen(mirror, "a"))["a"]["files"] == 1


@needs_forgetful_disks
@pytest.mark.parametrize("count", [1, 20])  # files of a checkpoint
@pytest.mark.parametrize("way", ["forgotten", "any"])
@pytest.mark.promise("power-loss")
async def test_after_a_power_loss_what_had_settled_is_pushed_and_nothing_else(
    mirror: ServingProcess, tmp_path: Path, way: Way, count: int
) -> None:
    def refuse(path: str) -> None:
        if path.startswith("settled"):
            raise ChangedError(path)

    with forgetful_disk(tmp_path / "machine") as disk:
        folder, journal = disk.place / "job", disk.place / "journal"
        folder.mkdir()
        for name in ("pushed", "settled"):
            for number in range(count):
                (folder / name / "deep").mkdir(parents=True, exist_ok=True)
                (folder / name / f"deep/{number}").write_bytes(BIG[: 9000 + number])
        sync_folder(disk.place)
        async with syncing(mirror, Reading(folder, refuse), journal, is_noting=True) as syncer:
            assert await syncer.run_once() == ["settled"]
        whole = (await checkpoints(mirror))["pushed"]["manifest"]
        for name in ("pushed", "torn"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "more").write_bytes(b"of which the name is durable, and the bytes are not")
            sync_folder(folder / name)
        sync_folder(folder)
        disk.lose_power(way, seed=1)
        async with syncing(mirror, Reading(folder), journal, is_noting=True) as syncer:
            assert await syncer.run_once(is_after_restart=True) == ["pushed", "torn"]
    found = await checkpoints(mirror)
    assert found.keys() == {"pushed", "settled"}
    assert found["pushed"]["manifest"] == whole
    assert found["settled"]["size_bytes"] == sum(9000 + number for number in range(count))


async def test_what_is_sent_is_paced_and_what_is_held_is_not(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    (folder / "a").mkdir()
    (folder / "a/model.safetensors").write_bytes(BIG)
    asked: list[int] = []

    def pace(size: int) -> float:
        asked.append(size)
        return 0.0

    for journal in ("one", "two"):
        async with syncing(mirror, Reading(folder), tmp_path / journal, pace=pace) as syncer:
            assert await syncer.run_once() == []
    assert sum(asked) == len(BIG)


def test_a_file_that_a_network_file_system_calls_stale_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "x").write_bytes(b"1")
    directory = JobDirectory(folder, 10)
    stamp = directory.look().files["x"]

    def stale(path: Any, flags: int, below: int | None = None) -> Any:
        if str(path).startswith("/proc/self/fd/"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, flags, below)

    monkeypatch.setattr("node_agent.job.tree.opened", stale)
    with pytest.raises(ChangedError), directory.opened("x", stamp):
        pass


async def test_run_once__writer_killed_before_its_last_file__pushes_what_is_whole_and_says_what_is_missing(
    mirror: ServingProcess, folder: Path, tmp_path: Path
) -> None:
    for name in ("step-1", "step-2"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"x")
    (folder / "step-1/.metadata").write_bytes(b"x")
    async with syncing(mirror, Reading(folder), tmp_path / "journal") as syncer:
        assert await syncer.run_once() == ["step-2"]
        assert ".metadata is missing" in syncer.reasons["step-2"]
        assert (await checkpoints(mirror)).keys() == {"step-1"}
        (folder / "step-2/.metadata").write_bytes(b"x")
        assert await syncer.run_once() == []
        assert syncer.reasons == {}
