"""Large chunks go past the page cache where that is possible, and are the same bytes where it is not."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from bdn.core.digest import digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.store.directory import DIRECT_BYTES, DirectoryStore

PAGE = mmap.PAGESIZE


def aligned(size: int) -> memoryview:
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    return buffer


class Writes:
    """Each write as (bytes, whether it was direct)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, bool]] = []
        self.failures: dict[int, OSError] = {}  # by number of the write
        write = os.write

        def noted(descriptor: int, content: Any) -> int:
            number, is_direct = len(self.seen), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
            self.seen.append((len(content), is_direct))
            if number in self.failures:
                raise self.failures[number]
            return write(descriptor, content)

        monkeypatch.setattr(os, "write", noted)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(monkeypatch)


def stored(store: DirectoryStore, content: memoryview | bytearray) -> bytes:
    digest = digest_of(content)
    store.put(digest, content)
    with store.open(digest) as file:
        return file.read()


@pytest.mark.parametrize("odd", [0, 1, PAGE - 1])
def test_whole_pages_are_written_directly_and_the_tail_is_not(tmp_path: Path, writes: Writes, odd: int) -> None:
    content = aligned(DIRECT_BYTES + odd)
    assert stored(DirectoryStore(tmp_path), content) == bytes(content)
    assert writes.seen == [(DIRECT_BYTES, True), *([(odd, False)] if odd else [])]


def test_little_is_written_through_the_page_cache(tmp_path: Path, writes: Writes) -> None:
    content = aligned(DIRECT_BYTES - 1)
    assert stored(DirectoryStore(tmp_path), content) == bytes(content)
    assert writes.seen == [(DIRECT_BYTES - 1, False)]


def test_memory_that_is_not_aligned_is_written_through_the_page_cache(tmp_path: Path, writes: Writes) -> None:
    content = aligned(DIRECT_BYTES + PAGE)[3:]
    assert stored(DirectoryStore(tmp_path), content) == bytes(content)
    assert writes.seen[-1] == (len(content), False)


def test_a_file_system_without_direct_writing_gets_the_same_bytes(
    tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refusing(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    content = aligned(DIRECT_BYTES)
    assert stored(DirectoryStore(tmp_path), content) == bytes(content)
    assert writes.seen == [(DIRECT_BYTES, False)]


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, writes: Writes) -> None:
    store, content = DirectoryStore(tmp_path), aligned(DIRECT_BYTES)
    writes.failures[0] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreUnavailableError, match="No space left"):
        store.put(digest_of(content), content)
    assert not list((tmp_path / "incoming").iterdir())
    assert stored(store, content) == bytes(content)
