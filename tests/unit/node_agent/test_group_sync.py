import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError
from bdn.disk.syscalls import file_system_magic, sync_file_system
from node_agent.disk import group_sync
from node_agent.disk.group_sync import FEW, GroupSync
from tests.support.crash.scripted_writes import failing
from tests.support.network.loops import settle


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(group_sync, "_TRUSTED", frozenset({magic_of(tmp_path)}))
    return tmp_path


@pytest.fixture
def paths(folder: Path) -> list[Path]:
    """As many files as are synced together."""
    found = [folder / f"{number}" for number in range(FEW)]
    for path in found:
        path.write_bytes(b"content")
    return found


def magic_of(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return file_system_magic(descriptor)
    finally:
        os.close(descriptor)


class Disk:
    """``syncfs`` in slow motion: each call waits until the test lets it end, and fails as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.failures: set[int] = set()
        monkeypatch.setattr(group_sync, "sync_file_system", self.sync)

    def sync(self, _: int) -> bool:
        self.calls += 1
        number = self.calls
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        if number in self.failures:
            raise OSError(errno.EIO, "Input/output error")
        return True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.may_end.release(100)


async def begun(disk: Disk) -> None:
    assert await asyncio.to_thread(disk.begun.acquire, timeout=30)


async def test_one_sync_serves_all_who_wait_and_nobody_who_came_while_it_ran_is_served_by_it(
    folder: Path, paths: list[Path], disk: Disk
) -> None:
    with GroupSync(folder) as sync:
        first = asyncio.create_task(sync.sync(paths, sync.mark()))
        await begun(disk)
        later = [asyncio.create_task(sync.sync(paths, sync.mark())) for _ in range(5)]
        await settle()
        disk.may_end.release()
        await first
        await begun(disk)
        await settle()
        assert not any(task.done() for task in later)  # their pages may have come behind the first one's back
        disk.may_end.release()
        await asyncio.gather(*later)
    assert disk.calls == 2


async def test_a_failure_is_told_to_everybody_who_had_written_before_it(
    folder: Path, paths: list[Path], disk: Disk
) -> None:
    """The kernel tells it once; whoever asks next is told that all is well."""
    disk.failures.add(1)
    disk.may_end.release(10)
    with GroupSync(folder) as sync:
        early, other = sync.mark(), sync.mark()
        with pytest.raises(DiskFailedError, match="Input/output error"):
            await sync.sync(paths, early)
        with pytest.raises(DiskFailedError, match="could not write earlier files back"):
            await sync.sync(paths, other)
        await sync.sync(paths, sync.mark())


async def test_a_failure_is_not_lost_with_a_canceled_caller(folder: Path, paths: list[Path], disk: Disk) -> None:
    disk.failures.add(1)
    with GroupSync(folder) as sync:
        mark = sync.mark()
        leaving = asyncio.create_task(sync.sync(paths, mark))
        await begun(disk)
        leaving.cancel()
        disk.may_end.release(10)
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(DiskFailedError):
            await sync.sync(paths, mark)


async def test_a_few_files_are_synced_one_by_one(
    folder: Path, paths: list[Path], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = note_syncs(monkeypatch)
    with GroupSync(folder) as sync:
        await sync.sync([*paths[1:-1], folder], sync.mark())
    assert synced == [*paths[1:-1], folder]
    assert disk.calls == 0


@pytest.mark.parametrize("doubt", ["file system", "kernel"])
async def test_where_syncfs_does_not_tell_failures_every_file_is_synced(
    folder: Path, paths: list[Path], disk: Disk, monkeypatch: pytest.MonkeyPatch, doubt: str
) -> None:
    if doubt == "kernel":
        monkeypatch.setattr(group_sync, "kernel_version", lambda: (5, 7))
    else:
        monkeypatch.setattr(group_sync, "_TRUSTED", frozenset({0x794C7630}))  # overlayfs
    synced = note_syncs(monkeypatch)
    with GroupSync(folder) as sync:
        await sync.sync(paths, sync.mark())
    assert synced == paths
    assert disk.calls == 0


def note_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    synced: list[Path] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return synced


async def test_one_by_one_a_failure_names_the_file(
    folder: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with GroupSync(folder) as sync, pytest.raises(DiskFailedError, match=f"{paths[0]}: Input/output error"):
        await sync.sync(paths[:2], sync.mark())


def test_the_kernel_s_own_call_syncs_and_refuses_what_is_not_open(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    sync_file_system(descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync_file_system(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_system_magic(descriptor)


async def test_sync__sandbox_refuses_syncfs__syncs_each_file(
    folder: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_sync, "sync_file_system", lambda _: False)
    synced = note_syncs(monkeypatch)

    with GroupSync(folder) as sync:
        for times in (1, 2):
            await sync.sync(paths, sync.mark())
            assert len(synced) == times * len(paths)
