"""What a DirectoryStore makes of a disk that changed its bytes."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.store.directory import KEPT, DirectoryStore
from tests.support.crash.rot import HOW, rot

CONTENT = b"the bytes of a chunk" * 1000
CHUNK = digest_of(CONTENT)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "store")
    store.put(CHUNK, memoryview(CONTENT))
    return store


@pytest.fixture
def path(store: DirectoryStore, tmp_path: Path) -> Path:
    return tmp_path / "store/chunks" / CHUNK.fanout


def evidence(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "store/quarantine").glob("*"))


def test_a_right_chunk_has_no_fault_and_is_not_set_aside(store: DirectoryStore, path: Path) -> None:
    assert store.fault(CHUNK) is None
    assert not store.set_aside(CHUNK)
    assert path.read_bytes() == CONTENT
    assert store.evidence() == 0


@pytest.mark.parametrize("how", HOW)
def test_every_damage_is_a_fault_and_only_a_wrong_file_is_evidence(
    store: DirectoryStore, path: Path, tmp_path: Path, how: str
) -> None:
    rot(path, how)
    found = path.read_bytes() if how not in ("absent", "unreadable") else None
    assert store.fault(CHUNK) is not None
    assert store.set_aside(CHUNK) == (how != "absent")
    assert not path.exists()
    assert store.fault(CHUNK) == "it is absent"
    assert [kept.read_bytes() for kept in evidence(tmp_path) if found is not None] == ([found] if found else [])
    store.put(CHUNK, memoryview(CONTENT))
    assert store.fault(CHUNK) is None


@pytest.mark.parametrize("how", HOW)
def test_putting_a_chunk_over_a_wrong_one_replaces_it(store: DirectoryStore, path: Path, how: str) -> None:
    """Whoever fetches it again would otherwise leave the wrong one, and count on it."""
    rot(path, how)
    store.put(CHUNK, memoryview(CONTENT))
    assert path.read_bytes() == CONTENT
    assert store.evidence() == (how != "absent")


def test_a_file_longer_than_any_chunk_is_not_read_to_its_end(store: DirectoryStore, path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert store.fault(CHUNK) == "it is longer than a chunk can be"
    assert CHUNK_SIZE < 1 << 40


def test_of_much_evidence_the_oldest_goes(store: DirectoryStore, path: Path, tmp_path: Path) -> None:
    for number in range(KEPT + 3):
        path.unlink(missing_ok=True)
        path.write_bytes(b"wrong %d" % number)
        assert store.set_aside(CHUNK)
    assert store.evidence() == KEPT
    assert evidence(tmp_path)[0].read_bytes() == b"wrong 3"
    assert evidence(tmp_path)[-1].read_bytes() == b"wrong %d" % (KEPT + 2)


def test_a_chunk_that_was_replaced_before_it_is_taken_is_given_back(
    store: DirectoryStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sees wrong bytes; B replaces them; A takes what is there now."""
    rot(path, "flipped")
    rename = Path.rename

    def replace_first(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        path.unlink()
        path.write_bytes(CONTENT)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", replace_first)
    assert not store.set_aside(CHUNK)
    assert path.read_bytes() == CONTENT
    assert evidence(tmp_path) == []


def test_a_store_that_is_gone_is_not_a_damaged_chunk(store: DirectoryStore, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailableError):
        store.fault(CHUNK)


@pytest.mark.parametrize("above", [0, 1], ids=["folder", "folder above"])
def test_a_folder_that_is_none_is_damage_of_what_was_in_it_until_it_is_taken_away(
    store: DirectoryStore, path: Path, tmp_path: Path, above: int
) -> None:
    broken = path.parents[above]
    broken.rename(tmp_path / "folder")
    broken.touch()
    assert store.fault(CHUNK) == "it cannot be read (Not a directory)"
    for attempt in (lambda: store.put(CHUNK, memoryview(CONTENT)), lambda: store.set_aside(CHUNK)):
        with pytest.raises(StoreUnavailableError, match="Not a directory"):
            attempt()
    broken.unlink()
    assert store.fault(CHUNK) == "it is absent"
    store.put(CHUNK, memoryview(CONTENT))
    assert store.fault(CHUNK) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("is_whole", [False, True], ids=["one folder", "the store"])
def test_a_folder_that_cannot_be_looked_into_is_damage_if_the_store_can_and_the_disk_means_it(
    store: DirectoryStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_whole: bool
) -> None:
    broken = tmp_path / "store" if is_whole else path.parent.parent

    def guarded(real: Any) -> Any:
        def call(place: Any, *given: Any, **named: Any) -> Any:
            if Path(place).is_relative_to(broken):
                raise OSError(number, os.strerror(number), str(place))
            return real(place, *given, **named)

        return call

    with monkeypatch.context() as disk:
        for owner, name in ((Path, "open"), (Path, "lstat"), (Path, "stat"), (os, "scandir")):
            disk.setattr(owner, name, guarded(getattr(owner, name)))
        if is_whole or number == errno.ESTALE:
            with pytest.raises(StoreUnavailableError, match=os.strerror(number)):
                store.fault(CHUNK)
        else:
            assert store.fault(CHUNK) == f"it cannot be read ({os.strerror(number)})"


def test_where_all_chunks_should_be_there_is_a_file_and_that_is_no_damage_of_each(
    store: DirectoryStore, path: Path, tmp_path: Path
) -> None:
    chunks = path.parents[2]
    chunks.rename(tmp_path / "elsewhere")
    chunks.touch()
    with pytest.raises(StoreUnavailableError, match="Not a directory"):
        store.fault(CHUNK)
