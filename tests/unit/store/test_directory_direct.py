"""Large chunks bypass the page cache where that is possible, and are the same bytes where it is not."""

import mmap
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from bdn.disk.direct import LEAST_BYTES
from bdn.store.directory import DirectoryStore
from tests.support.crash.scripted_writes import Writes, aligned

CONTENT = bytes(range(256)) * (LEAST_BYTES // 256 + mmap.PAGESIZE // 256)


def stored(store: DirectoryStore, content: memoryview) -> bytes:
    digest = digest_of(content)
    store.put(digest, content)
    with store.open(digest) as file:
        return file.read()


def test_large_aligned_chunks_are_written_directly_and_one_unaligned_buffer_changes_nothing_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    writes = Writes.noted(monkeypatch)
    tail = aligned(CONTENT[: LEAST_BYTES + 1])
    for content, kinds in [
        (aligned(CONTENT), [True]),
        (tail, [True, False]),
        (aligned(CONTENT[: LEAST_BYTES - 1]), [False]),
        (aligned(b"xyz" + CONTENT[:-1])[3:], [True, False]),
        (aligned(CONTENT[mmap.PAGESIZE :]), [True]),
    ]:
        writes.seen.clear()
        assert stored(store, content) == bytes(content)
        assert [is_direct for _, _, is_direct in writes.seen] == kinds
