"""The parts of the scrub one by one: reading past the cache, evidence, the pace, the record, and files of other users."""

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, ByteRange, PlacedChunk, digest_of
from bdn.core.pace.rounds import Position, ScrubRound
from bdn.disk.direct import UncachedFile
from bdn.mirror.settings import MirrorSettings
from bdn.transfer.byte_threads import BufferPool
from bdn.wire.operation_schema import LISTED, DamagedItem
from node_agent.cache.quarantine import Evidence, Quarantine, SuspectFiles
from node_agent.mirror_link.commands import report_of
from node_agent.scrub.reading import Findings
from node_agent.scrub.repair import rewrite
from node_agent.scrub.scrubber import ScrubRecord
from node_agent.stage.stage import NodeStage, StageRecord, StageRegistry
from node_agent.stage.warm import STEP, StagesFirst
from tests.support.content.names import named
from tests.support.content.noise import noise
from tests.support.crash.scripted_writes import failing


def evidence(number: int) -> Evidence:
    return Evidence(1000.0 + number, "node", "b3:f", 0, f"b3:{number:064x}", None, "it rotted")


# --- reading ---


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size", [1, 4096, CHUNK_SIZE, CHUNK_SIZE + 1, CHUNK_SIZE + 5000])
def test_every_chunk_is_read_whatever_its_size(
    tmp_path: Path, size: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = noise(size, size)
    (tmp_path / "file").write_bytes(content)
    if not is_direct:
        monkeypatch.setattr(os, "O_DIRECT", 0o100000000)  # a flag that open ignores, and that changes nothing
    found = b""
    with BufferPool(1).take(CHUNK_SIZE) as buffer, UncachedFile(tmp_path / "file") as file:
        for start in range(0, size, CHUNK_SIZE):
            count = file.read(buffer, start, min(CHUNK_SIZE, size - start))
            found += bytes(buffer[:count])
        assert file.read(buffer, (len(content) + 4095) // 4096 * 4096, 100) == 0

    assert found == content


def test_a_file_system_that_takes_no_direct_reads_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    real, asked = os.preadv, []

    def refuse(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(descriptor)
        if len(asked) == 1:
            raise OSError(22, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    with BufferPool(1).take(CHUNK_SIZE) as buffer, UncachedFile(tmp_path / "file") as file:
        assert bytes(buffer[: file.read(buffer, 0, 7)]) == b"content"
        assert bytes(buffer[: file.read(buffer, 0, 7)]) == b"content"


def test_uncached_file__sandbox_refuses_direct_reads_and_advice__is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr(os, "O_DIRECT", 0o100000000 | os.O_DIRECTORY)  # so that opening it fails
    monkeypatch.setattr(os, "posix_fadvise", failing(errno.EPERM))
    with BufferPool(1).take(CHUNK_SIZE) as buffer, UncachedFile(tmp_path / "file") as file:
        assert bytes(buffer[: file.read(buffer, 0, 7)]) == b"content"


# --- evidence ---


def test_the_quarantine_keeps_so_many_items_and_the_oldest_go(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path, kept=3)
    for number in range(5):
        quarantine.keep(evidence(number), memoryview(b"wrong %d" % number))
        os.utime(tmp_path)

    kept = sorted(path.read_bytes() for path in tmp_path.glob("*.bytes"))
    assert kept == [b"wrong 2", b"wrong 3", b"wrong 4"]
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_a_whole_file_in_quarantine_is_one_item_and_two_of_a_name_are_two(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "q", kept=64)
    (tmp_path / "q").mkdir()
    for content in (b"one", b"two"):
        (tmp_path / "file").write_bytes(content)
        quarantine.take(tmp_path / "file")

    assert [(tmp_path / "q" / f"file.{number}").read_bytes() for number in (0, 1)] == [b"one", b"two"]


def test_a_disk_that_takes_no_evidence_keeps_nobody_from_a_repair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Quarantine(tmp_path / "absent").keep(evidence(1), memoryview(b"wrong"))

    assert "cannot store evidence" in caplog.text


# --- the report ---


def test_the_report_of_a_disk_that_has_lost_everything_fits_into_a_heartbeat() -> None:
    path = "a/" * 2000
    lost = DamagedItem(
        tier="node", path=path, chunk=str(digest_of(b"")), outcome="lost", reason="it is not on the disk"
    )
    report, error = report_of(Findings(items=[lost] * 20_000))
    assert (len(report.items), error and error.code) == (LISTED, "LIMIT_EXCEEDED")
    assert len(report.model_dump_json()) < MirrorSettings().limit_request_bytes * 3 // 4
    assert report_of(Findings(items=[lost]))[1] is None


# --- the pace ---


async def test_nothing_is_read_while_a_stage_brings_files(tmp_path: Path) -> None:
    book = StageRegistry()
    stage = book.enter(
        NodeStage(
            StageRecord(id="stg_1", job_id="j", organisation="o", grant="g", state="STAGING", created_at=0, mounts=[])
        )
    )
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    pace = StagesFirst(book, 1000, sleep)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(pace(10))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        stage.record.state = "READY"
        stage.notify()
    assert waits == [0]

    await pace(STEP + 1000)
    assert 0.9 < waits[1] <= 1.02  # a thousand bytes more than a burst, at a thousand per second


# --- the record ---


def test_the_record_says_after_a_restart_how_far_the_round_is_and_whom_to_look_at_first(tmp_path: Path) -> None:
    suspects = SuspectFiles()
    suspects.add(named("suspect"))
    record = ScrubRecord(tmp_path / "scrub.json", suspects, 1000)
    record.round = ScrubRound(500, Position(named("m"), "cluster", named("c")))
    record.save()

    found = ScrubRecord(tmp_path / "scrub.json", SuspectFiles(), 2000)
    found.load()

    assert found.round == record.round
    assert found.suspects.all() == (named("suspect"),)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"began": 1, "manifest": "x", "tier": "node", "content": "y"}'])
def test_a_damaged_record_costs_a_round_that_begins_anew(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "scrub.json").write_bytes(content)
    record = ScrubRecord(tmp_path / "scrub.json", SuspectFiles(), 2000)
    record.load()

    assert record.round == ScrubRound(2000)


def test_a_suspect_is_told_of_once_until_it_was_looked_at() -> None:
    suspects = SuspectFiles()
    told: list[None] = []
    suspects.on_news = lambda: told.append(None)
    for _ in range(3):
        suspects.add(named("a"))
    suspects.clear(named("a"))
    suspects.add(named("a"))

    assert len(told) == 2


# --- mending ---


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"somebody else's")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    chunk = PlacedChunk(digest_of(b"right"), 0, ByteRange(0, 5))

    with pytest.raises(Exception, match="disk failed"):
        rewrite(tmp_path / "file", chunk, BufferPool(1), memoryview(b"right"))

    assert (tmp_path / "other").read_bytes() == b"somebody else's"


AS_NOBODY = """
import os, sys
from pathlib import Path
from bdn.core.chunk import ByteRange
from bdn.core.chunk import digest_of
from bdn.core.chunk import PlacedChunk
from bdn.transfer.byte_threads import BufferPool
from node_agent.scrub.repair import rewrite
path = Path(sys.argv[1])
os.chown(path, 65534, 65534)
os.setgid(65534), os.setuid(65534)
rewrite(path, PlacedChunk(digest_of(b"right"), 0, ByteRange(0, 5)), BufferPool(1), memoryview(b"right"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root alone can")
def test_an_agent_that_is_not_root_mends_its_read_only_files_and_they_stay_as_old_as_they_were(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        if folder.stat().st_uid == 0:
            folder.chmod(folder.stat().st_mode | 0o111)
    file = tmp_path / "file"
    file.write_bytes(b"wrong")
    file.chmod(0o444)
    os.utime(file, ns=(5, 7))

    done = subprocess.run([sys.executable, "-c", AS_NOBODY, str(file)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert file.read_bytes() == b"right"
    assert (file.stat().st_mode & 0o777, file.stat().st_mtime_ns) == (0o444, 7)
