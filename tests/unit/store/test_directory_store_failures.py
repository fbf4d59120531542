"""What a DirectoryStore leaves on its disk, and what it makes of a disk that fails."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.store.directory import DirectoryStore
from tests.support.content.disks import small_disk, writing_refused
from tests.support.content.names import named

CONTENT = b"the bytes of a chunk"
CHUNK = digest_of(CONTENT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_store_makes_its_folder_with_all_parents(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "a" / "b").put(CHUNK, memoryview(CONTENT))
    assert files_below(tmp_path) == [f"a/b/chunks/{CHUNK.fanout}"]


def test_a_chunk_is_one_read_only_file_named_by_its_digest_and_nothing_else_is_left(root: Path) -> None:
    umask = os.umask(0o022)
    try:
        DirectoryStore(root).put(CHUNK, memoryview(CONTENT))
    finally:
        os.umask(umask)
    assert files_below(root) == [f"chunks/{CHUNK.fanout}"]
    assert stat.S_IMODE((root / "chunks" / CHUNK.fanout).stat().st_mode) == 0o444


def test_what_a_crash_left_half_written_is_cleared_and_no_chunk_with_it(root: Path) -> None:
    store = DirectoryStore(root)
    store.put(CHUNK, memoryview(CONTENT))
    (root / "incoming" / "4711-aabbccdd-0").write_bytes(CONTENT[:3])
    (root / "incoming" / "4711-aabbccdd-1").write_bytes(b"")
    DirectoryStore(root).clear_incoming()
    assert files_below(root) == [f"chunks/{CHUNK.fanout}"]


def test_a_write_that_the_kernel_cuts_short_is_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write = DirectoryStore(root), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, offset: write(descriptor, content[:7], offset))
    store.put(CHUNK, memoryview(CONTENT))
    with store.open(CHUNK) as file:
        assert file.read() == CONTENT


def test_a_disk_that_fills_up_in_the_middle_of_a_chunk_is_an_error_that_may_pass(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = DirectoryStore(root), os.pwrite

    def fill_up(descriptor: int, content: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:7], offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(StoreUnavailableError, match="No space left on device") as raised:
        store.put(CHUNK, memoryview(CONTENT))
    assert raised.value.transient
    assert files_below(root) == []


def test_a_disk_that_is_really_full_leaves_nothing_half_written_and_keeps_what_it_held(root: Path) -> None:
    with small_disk(root, 4 << 20):
        store = DirectoryStore(root)
        store.put(CHUNK, memoryview(CONTENT))
        too_much = os.urandom(CHUNK_SIZE)
        with pytest.raises(StoreUnavailableError, match="No space left on device"):
            store.put(digest_of(too_much), memoryview(too_much))
        assert files_below(root) == [f"chunks/{CHUNK.fanout}"]
        store.put(named("small"), memoryview(b"there is room for this again"))


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put(named("new"), memoryview(b"new")),
        lambda store: store.collect(next(store.stored([CHUNK]))),
        lambda store: store.clear_incoming(),
    ],
    ids=["put", "collect", "clear_incoming"],
)
def test_a_directory_that_may_not_be_written_is_an_unavailable_store(
    root: Path, act: Callable[[DirectoryStore], None]
) -> None:
    store = DirectoryStore(root)
    store.put(CHUNK, memoryview(CONTENT))
    (root / "incoming" / "leftover").write_bytes(b"")
    with writing_refused(root):
        with pytest.raises(StoreUnavailableError, match=f"{root}: "):
            act(store)
        with store.open(CHUNK) as file:
            assert file.read() == CONTENT


@pytest.mark.parametrize("lost", ["store", "store/chunks"])
def test_a_store_that_is_gone_does_not_say_that_it_never_held_the_chunk(root: Path, lost: str) -> None:
    """Its disk is not mounted: whoever heard NOT_FOUND would give up a chunk that is safe."""
    store = DirectoryStore(root)
    store.put(CHUNK, memoryview(CONTENT))
    (root.parent / lost).rename(root.parent / "elsewhere")
    with pytest.raises(StoreUnavailableError, match="No such file or directory"):
        store.open(CHUNK)


def test_a_directory_that_cannot_be_made_is_an_unavailable_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(StoreUnavailableError, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file" / "store")
    with pytest.raises(StoreUnavailableError, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file")


@pytest.mark.parametrize("act", ["put", "open", "keep"])
def test_a_folder_that_is_no_folder_is_an_unavailable_store(root: Path, act: str) -> None:
    """Something other than us wrote there: this is not "the chunk is absent"."""
    store = DirectoryStore(root)
    (root / "chunks" / CHUNK.hex[:2]).write_bytes(b"in the way")
    with pytest.raises(StoreUnavailableError):
        store.put(CHUNK, memoryview(CONTENT)) if act == "put" else getattr(store, act)(CHUNK)
