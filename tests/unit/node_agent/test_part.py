import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bdn.core.chunk import CHUNK_SIZE, FileLayout, digest_of
from bdn.core.errors import DiskFailedError
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import write_all
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.fill import part as module
from node_agent.fill.part import SYNC_CHUNKS, Bitmap, PartialFile
from tests.support.content.layouts import whole
from tests.support.content.noise import MIB, noise
from tests.support.crash.scripted_writes import Writes, aligned, failing, open_descriptors


def write(part: PartialFile, content: bytes, *indices: int) -> None:
    for chunk in part.layout.placed():
        if chunk.index in indices:
            part.write(chunk, aligned(content[chunk.range.start : chunk.range.stop]))


def held(part: PartialFile) -> list[int]:
    buffer = memoryview(bytearray(CHUNK_SIZE))
    return [chunk.index for chunk in part.layout.placed() if part.holds(chunk, buffer[: chunk.range.size])]


CONTENT = noise(17 * MIB + 3, 1)


def opened(places: Places, content: bytes = CONTENT) -> PartialFile:
    part = PartialFile(WholeFiles(places), whole(content), DirectWrites())
    part.open()
    return part


def left_with(places: Places, *indices: int) -> FileLayout:
    """An earlier fill wrote these chunks, and broke off."""
    part = opened(places)
    write(part, CONTENT, *indices)
    part.close()
    return part.layout


@contextmanager
def resumed(places: Places, content: bytes = CONTENT) -> Iterator[PartialFile]:
    part = opened(places, content)
    yield part
    part.close()


def test_the_next_fill_goes_on_from_the_chunks_that_were_written_and_not_damaged(places: Places) -> None:
    layout = left_with(places, 0, 2)
    with resumed(places) as part:
        assert held(part) == [0, 2]
    with places.part(layout.digest).open("r+b") as file:
        file.seek(17)
        file.write(b"damage")
    with resumed(places) as part:
        assert held(part) == [2]


def test_no_chunk_is_recorded_before_it_was_synced(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    content = noise(1000)
    layout = FileLayout.of(
        (SYNC_CHUNKS + 1) * CHUNK_SIZE, tuple(digest_of(bytes([index])) for index in range(SYNC_CHUNKS + 1))
    )
    events: list[str] = []
    part = PartialFile(WholeFiles(places), layout, DirectWrites())
    part.open()
    real_sync = os.fdatasync

    def note_sync(descriptor: int) -> None:
        events.append("sync")
        real_sync(descriptor)

    def note_bitmap(descriptor: int, buffer: memoryview, offset: int) -> None:
        events.append("bitmap")
        write_all(descriptor, buffer, offset)

    monkeypatch.setattr(os, "fdatasync", note_sync)
    monkeypatch.setattr(module, "write_all", note_bitmap)
    monkeypatch.setattr(DirectFile, "write", lambda *_: events.append("chunk"))
    for chunk in layout.placed():
        part.write(chunk, memoryview(content))
    part.close()

    assert events == ["chunk"] * SYNC_CHUNKS + ["sync", "bitmap", "sync", "chunk", "sync", "bitmap", "sync"]


def test_a_part_of_another_length_is_begun_anew(places: Places) -> None:
    layout = whole(CONTENT)
    places.part(layout.digest).write_bytes(b"x" * (len(CONTENT) + 1))
    with resumed(places) as part:
        assert held(part) == []
        assert places.part(layout.digest).stat().st_size == len(CONTENT)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_disk_without_room_fails_before_the_first_byte(
    places: Places, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    layout = left_with(places, 1) if is_resumed else whole(CONTENT)
    before = open_descriptors()
    monkeypatch.setattr(module, "allocate", failing(errno.ENOSPC))
    with pytest.raises(DiskFailedError, match="No space left on device") as caught:
        opened(places)
    assert caught.value.path == str(places.part(layout.digest))
    assert places.part(layout.digest).exists() == is_resumed  # what was there stays; what was new is gone
    assert open_descriptors() == before


def test_a_file_system_that_cannot_allocate_is_asked_for_a_length(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "allocate", failing(errno.EOPNOTSUPP))
    part = opened(places)
    write(part, CONTENT, 0, 1, 2)
    part.commit()
    part.close()
    assert places.file(part.layout.digest).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT, b"small"])
def test_a_part_without_a_whole_chunk_is_not_kept(places: Places, content: bytes) -> None:
    part = opened(places, content)
    assert places.part(part.layout.digest).exists()
    part.close()
    assert list(places.filling.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_chunk_that_could_not_be_written_is_not_held_and_the_others_are(
    places: Places, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = open_descriptors()
    part = opened(places)
    write(part, CONTENT, 0)
    Writes.noted(monkeypatch).steps.append(failing(number))
    with pytest.raises(DiskFailedError, match=os.strerror(number)) as caught:
        write(part, CONTENT, 1)
    part.close()

    assert caught.value.path == str(places.part(part.layout.digest))
    assert open_descriptors() == before
    with resumed(places) as again:
        assert held(again) == [0]


def test_after_a_sync_that_failed_nothing_more_is_recorded_however_well_later_ones_go(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel told once that pages are lost. The next sync says that all is well, and the pages are still lost."""
    monkeypatch.setattr(module, "SYNC_CHUNKS", 2)
    content = noise(5 * CHUNK_SIZE)
    part = opened(places, content)
    write(part, content, 0, 1)

    def lost(_: int) -> None:
        monkeypatch.undo()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "SYNC_CHUNKS", 2)
    monkeypatch.setattr(os, "fdatasync", lost)
    write(part, content, 2)
    with pytest.raises(DiskFailedError, match="Input/output error"):
        write(part, content, 3)
    write(part, content, 4)  # by another thread, which has not heard of it
    part.close()

    with resumed(places, content) as again:
        assert held(again) == [0, 1]


def test_a_bitmap_survives_the_way_over_the_disk() -> None:
    bitmap = Bitmap(19)
    bitmap.add([0, 7, 8, 18])

    again = Bitmap.parse(bitmap.to_bytes(), 19)

    assert [index for index in range(19) if index in again] == [0, 7, 8, 18]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 19, Bitmap(20).to_bytes(), Bitmap(19).to_bytes()[:-1], Bitmap(19).to_bytes() + b"\xff"]
)
def test_the_bitmap_of_something_else_is_empty(content: bytes) -> None:
    bitmap = Bitmap.parse(content, 19)

    assert not any(index in bitmap for index in range(19))
