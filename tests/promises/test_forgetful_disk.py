"""The disk that the tests of power losses stand on: it really forgets, and it keeps what it should."""

import errno
import mmap
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bdn.disk.durable import sync_folder, write_at_once, write_durably
from bdn.disk.syscalls import allocate, exchange
from tests.support.content.trees import tree
from tests.support.crash.forgetful_disk import ForgetfulDisk, forgetful_disk, needs_forgetful_disks

pytestmark = needs_forgetful_disks
SEEDS = range(50)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ForgetfulDisk]:
    with forgetful_disk(tmp_path) as disk:
        yield disk


def write(path: Path, content: bytes, *, is_synced: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, content, 0)
        if is_synced:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.promise("power-loss")
def test_a_program_that_does_not_sync_loses_what_it_wrote(disk: ForgetfulDisk) -> None:
    """Without this, every test on such a disk would be vacuous."""
    write(disk.place / "unsynced", b"content", is_synced=False)
    write(disk.place / "synced", b"content", is_synced=True)
    sync_folder(disk.place)
    write(disk.place / "nameless", b"content", is_synced=True)
    disk.lose_power("forgotten")
    assert tree(disk.place) == {"unsynced": b"", "synced": b"content"}


def test_a_rename_may_outlive_the_bytes_that_it_was_to_publish(disk: ForgetfulDisk) -> None:
    found: set[bytes | None] = set()
    for seed in SEEDS:
        path = disk.place / f"record-{seed}"
        write_at_once(path, b"x" * 8192)
        disk.lose_power("any", seed)
        found.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", b"x" * 8192, bytes(8192)} <= found
    assert {b"x" * 4096 + bytes(4096), bytes(4096) + b"x" * 4096} & found


def test_what_was_written_durably_survives_every_power_loss(disk: ForgetfulDisk) -> None:
    path = disk.place / "record"
    for seed in SEEDS:
        write_durably(path, str(seed).encode() * 5000)
        write_at_once(path.with_name("other"), b"y" * 9999)
        disk.lose_power("any", seed)
        assert path.read_bytes() == str(seed).encode() * 5000


def test_a_file_moved_between_folders_never_vanishes(disk: ForgetfulDisk) -> None:
    for seed in SEEDS:
        source, target = disk.place / f"source-{seed}", disk.place / f"target-{seed}"
        source.mkdir()
        target.mkdir()
        write(source / "file", b"content", is_synced=True)
        sync_folder(source)
        sync_folder(disk.place)
        (source / "file").rename(target / "file")
        if seed % 2:
            sync_folder(source if seed % 4 == 1 else target)
        disk.lose_power("any", seed)
        assert {path.read_bytes() for path in (*source.iterdir(), *target.iterdir())} == {b"content"}


def test_links_exchanges_and_open_files_are_what_they_are_elsewhere(disk: ForgetfulDisk) -> None:
    write(disk.place / "file", b"content", is_synced=False)
    for name in ("one", "two"):
        (disk.place / name).mkdir()
    os.link(disk.place / "file", disk.place / "one/link")
    exchange(disk.place / "one", disk.place / "two")
    (disk.place / "symlink").symlink_to("two/link")
    assert (disk.place / "symlink").read_bytes() == b"content"
    assert (disk.place / "file").samefile(disk.place / "two/link")
    assert (disk.place / "file").stat().st_nlink == 2
    with (disk.place / "file").open("r+b") as file:
        allocate(file.fileno(), 10_000)
        (disk.place / "file").unlink()
        (disk.place / "two/link").unlink()
        assert os.fstat(file.fileno()).st_size == 10_000
        direct = os.open(disk.place / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        assert os.pwrite(direct, mmap.mmap(-1, 8192), 0) == 8192
        os.close(direct)
    disk.sync()
    disk.lose_power("forgotten")
    assert tree(disk.place) == {"direct": bytes(8192)}


def test_faults_come_when_they_are_due(disk: ForgetfulDisk) -> None:
    disk.refuse("write", "*.part", number=errno.ENOSPC, skip=1, times=1)
    write(disk.place / "a.part", b"content", is_synced=False)
    with pytest.raises(OSError, match="No space left"):
        write(disk.place / "b.part", b"content", is_synced=False)
    write(disk.place / "c.part", b"content", is_synced=False)
    assert disk.faults_met == 1
    disk.shorten(size=3)
    descriptor = os.open(disk.place / "short", os.O_WRONLY | os.O_CREAT)
    assert os.pwrite(descriptor, b"content", 0) == 3
    os.close(descriptor)
    disk.mend()
    disk.resize(4096)
    with pytest.raises(OSError, match="No space left"):
        write(disk.place / "large", bytes(8192), is_synced=False)


def test_a_sync_that_failed_leaves_pages_that_no_later_sync_writes(disk: ForgetfulDisk) -> None:
    disk.refuse("fsync", times=1)
    descriptor = os.open(disk.place / "file", os.O_WRONLY | os.O_CREAT)
    os.pwrite(descriptor, b"content", 0)
    with pytest.raises(OSError, match="Input/output"):
        os.fsync(descriptor)
    os.fsync(descriptor)
    os.close(descriptor)
    sync_folder(disk.place)
    assert (disk.place / "file").read_bytes() == b"content"
    disk.lose_power("forgotten")
    assert (disk.place / "file").read_bytes() == bytes(7)


def test_a_database_that_syncs_keeps_every_commit(disk: ForgetfulDisk) -> None:
    for seed in SEEDS:
        with closing(sqlite3.connect(disk.place / "rows.sqlite", isolation_level=None)) as rows:
            rows.execute("PRAGMA journal_mode=WAL")
            rows.execute("PRAGMA synchronous=FULL")
            rows.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER)")
            rows.execute("INSERT INTO numbers VALUES (?)", (seed,))
            disk.lose_power("any", seed)
        with closing(sqlite3.connect(disk.place / "rows.sqlite")) as rows:
            assert [number for (number,) in rows.execute("SELECT number FROM numbers")] == list(range(seed + 1))
