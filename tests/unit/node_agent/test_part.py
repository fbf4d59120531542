from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.digest import digest_of
from bdn.core.errors import DiskFailedError
from bdn.core.store.layout import FileLayout
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import write_all
from node_agent.disk.places import Places
from node_agent.fill import part as module
from node_agent.fill.part import SYNC_CHUNKS, PartialFile
from tests.support.agent.rig import noise
from tests.support.crash.scripted_writes import Writes, aligned, failing, open_descriptors


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path)
    places.make()
    return places


def layout_of(content: bytes) -> FileLayout:
    pieces = [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]
    return FileLayout.of(len(content), tuple(digest_of(piece) for piece in pieces))


def write(part: PartialFile, content: bytes, *indices: int) -> None:
    for chunk in part.layout.placed():
        if chunk.index in indices:
            part.write(chunk, aligned(content[chunk.range.start : chunk.range.stop]))


def held(part: PartialFile) -> list[int]:
    buffer = memoryview(bytearray(CHUNK_SIZE))
    return [chunk.index for chunk in part.layout.placed() if part.holds(chunk, buffer[: chunk.range.size])]


CONTENT = noise(2 * CHUNK_SIZE + 1000)


def test_a_whole_file_appears_read_only_under_its_name_and_leaves_nothing_else(places: Places) -> None:
    part = PartialFile(places, layout_of(CONTENT), DirectWrites())

    part.open()
    write(part, CONTENT, 2, 0, 1)
    part.commit()
    part.close()

    file = places.file(part.layout.digest)
    assert file.read_bytes() == CONTENT
    assert file.stat().st_mode & 0o777 == 0o444
    assert list(places.filling.iterdir()) == []


def test_an_empty_file_is_a_file(places: Places) -> None:
    part = PartialFile(places, layout_of(b""), DirectWrites())

    part.open()
    part.commit()
    part.close()

    assert places.file(part.layout.digest).read_bytes() == b""


def test_the_next_fill_goes_on_from_the_chunks_that_were_written(places: Places) -> None:
    first = PartialFile(places, layout_of(CONTENT), DirectWrites())
    first.open()
    write(first, CONTENT, 0, 2)
    first.close()

    second = PartialFile(places, layout_of(CONTENT), DirectWrites())
    second.open()

    assert held(second) == [0, 2]
    second.close()


def test_a_chunk_that_was_damaged_on_disk_is_not_held(places: Places) -> None:
    first = PartialFile(places, layout_of(CONTENT), DirectWrites())
    first.open()
    write(first, CONTENT, 0, 1)
    first.close()
    with places.part(first.layout.digest).open("r+b") as file:
        file.seek(CHUNK_SIZE + 17)
        file.write(b"damage")

    second = PartialFile(places, layout_of(CONTENT), DirectWrites())
    second.open()

    assert held(second) == [0]
    second.close()


def test_no_chunk_is_recorded_before_it_was_synced(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    content = noise(1000)
    layout = FileLayout.of(
        (SYNC_CHUNKS + 1) * CHUNK_SIZE, tuple(digest_of(bytes([index])) for index in range(SYNC_CHUNKS + 1))
    )
    events: list[str] = []
    part = PartialFile(places, layout, DirectWrites())
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
    layout = layout_of(CONTENT)
    places.part(layout.digest).write_bytes(b"x" * (len(CONTENT) + 1))

    part = PartialFile(places, layout, DirectWrites())
    part.open()

    assert held(part) == []
    assert places.part(layout.digest).stat().st_size == len(CONTENT)
    part.close()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_disk_without_room_fails_before_the_first_byte(
    places: Places, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    layout = layout_of(CONTENT)
    if is_resumed:
        earlier = PartialFile(places, layout, DirectWrites())
        earlier.open()
        write(earlier, CONTENT, 1)
        earlier.close()

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "allocate", no_room)
    part = PartialFile(places, layout, DirectWrites())
    with pytest.raises(DiskFailedError, match="No space left on device") as caught:
        part.open()

    assert caught.value.path == str(places.part(layout.digest))
    assert places.part(layout.digest).exists() == is_resumed  # what was there stays; what was new is gone


def test_a_file_system_that_cannot_allocate_is_asked_for_a_length(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(module, "allocate", unsupported)
    part = PartialFile(places, layout_of(CONTENT), DirectWrites())
    part.open()
    write(part, CONTENT, 0, 1, 2)
    part.commit()
    part.close()

    assert places.file(part.layout.digest).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT, b"small"])
def test_a_part_without_a_whole_chunk_is_not_kept(places: Places, content: bytes) -> None:
    part = PartialFile(places, layout_of(content), DirectWrites())
    part.open()
    assert places.part(part.layout.digest).exists()
    part.close()

    assert list(places.filling.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_chunk_that_could_not_be_written_is_not_held_and_the_others_are(
    places: Places, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = open_descriptors()
    part = PartialFile(places, layout_of(CONTENT), DirectWrites())
    part.open()
    write(part, CONTENT, 0)
    Writes.noted(monkeypatch).steps.append(failing(number))
    with pytest.raises(DiskFailedError, match=os.strerror(number)) as caught:
        write(part, CONTENT, 1)
    part.close()

    assert caught.value.path == str(places.part(part.layout.digest))
    assert open_descriptors() == before
    again = PartialFile(places, part.layout, DirectWrites())
    again.open()
    assert held(again) == [0]
    again.close()


def test_after_a_sync_that_failed_nothing_more_is_recorded_however_well_later_ones_go(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel told once that pages are lost. The next sync says that all is well, and the pages are still lost."""
    monkeypatch.setattr(module, "SYNC_CHUNKS", 2)
    content = noise(5 * CHUNK_SIZE)
    part = PartialFile(places, layout_of(content), DirectWrites())
    part.open()
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

    again = PartialFile(places, part.layout, DirectWrites())
    again.open()
    assert held(again) == [0, 1]
    again.close()


def test_a_part_that_cannot_be_opened_leaves_no_descriptor(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "allocate", broken)
    with pytest.raises(DiskFailedError):
        PartialFile(places, layout_of(CONTENT), DirectWrites()).open()
    assert open_descriptors() == before
