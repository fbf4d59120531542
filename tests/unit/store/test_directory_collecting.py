"""What a crash leaves in the middle of collecting a chunk, and two who collect the same one at once."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from bdn.store.directory import DirectoryStore

CONTENT = b"collected by somebody who was killed"
CHUNK = digest_of(CONTENT)


@pytest.mark.promise("collection")
def test_a_chunk_that_a_crash_left_aside_can_be_read_and_is_put_back_by_who_opens_the_store(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put(CHUNK, bytearray(CONTENT))
    (seen,) = store.stored()
    (tmp_path / "chunks" / CHUNK.fanout).rename(tmp_path / "aside" / CHUNK.hex)
    with store.open(CHUNK) as file:
        assert file.read() == CONTENT
    assert not store.keep(CHUNK)

    assert list(DirectoryStore(tmp_path).stored()) == [seen]
    assert store.keep(CHUNK)
    assert list((tmp_path / "aside").iterdir()) == []


@pytest.mark.promise("collection")
def test_what_a_crash_left_aside_does_not_take_the_place_of_what_was_put_since(tmp_path: Path) -> None:
    # A collector that was killed, or whose disk failed, has moved the chunk aside; a copy does not find it, puts it again, and
    # counts on it: a collection that begins now must see when that was.
    now = 1000.0
    store = DirectoryStore(tmp_path, lambda: now)
    store.put(CHUNK, bytearray(CONTENT))
    (tmp_path / "chunks" / CHUNK.fanout).rename(tmp_path / "aside" / CHUNK.hex)
    now = 5000.0
    store.put(CHUNK, bytearray(CONTENT))

    (seen,) = store.stored()

    assert seen.kept_at == 5000
    assert list((tmp_path / "aside").iterdir()) == []


@pytest.mark.parametrize("folder", ["chunks/aa/bb", "aside"])
def test_what_is_no_chunk_keeps_nobody_from_opening_the_store_or_going_through_it(tmp_path: Path, folder: str) -> None:
    store = DirectoryStore(tmp_path)
    store.put(CHUNK, bytearray(CONTENT))
    stray = tmp_path / folder / ".nfs0000000000a1b2c3"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.touch()

    assert [chunk.digest for chunk in DirectoryStore(tmp_path).stored()] == [CHUNK]
    assert stray.exists()


class _Interrupted(DirectoryStore):
    """Somebody does something between its look at the time of what lies aside and what follows from it."""

    meanwhile: Callable[[], object]

    def _kept_at(self, aside: Path) -> float:
        found = super()._kept_at(aside)
        self.meanwhile()
        return found


@pytest.mark.promise("collection")
def test_a_chunk_that_is_put_anew_while_two_collect_it_stays(tmp_path: Path) -> None:
    """As when one of them has lost its lock, and has not heard of it."""
    times = count(1.0)
    first = _Interrupted(tmp_path, lambda: next(times))
    second = DirectoryStore(tmp_path, lambda: next(times))
    first.put(CHUNK, bytearray(CONTENT))
    (seen,) = first.stored()

    def meanwhile() -> None:
        second.put(CHUNK, bytearray(CONTENT))
        assert not second.collect(seen)

    first.meanwhile = meanwhile
    assert first.collect(seen), "the old one"
    with first.open(CHUNK) as file:
        assert file.read() == CONTENT
