import errno
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bdn.core.chunk import EMPTY, Slice
from bdn.core.errors import DiskFailedError, InternalError
from node_agent.disk.cache_directory import CacheDirectory
from node_agent.disk.places import Places, temporary_name
from node_agent.fill import part
from node_agent.fill.part import PackedParts
from tests.support.content.layouts import pack
from tests.support.content.trees import names
from tests.support.crash.scripted_writes import failing

FILES = [f"small file {number}".encode() for number in range(12)]
((_, SLAB, LAYOUTS),) = pack(FILES)


def visible(places: Places) -> list[str]:
    return [name for name in names(places.files) if not name.startswith(".")]


async def test_the_files_of_a_slab_appear_read_only_under_their_names_and_leave_nothing_else(
    disk: CacheDirectory,
) -> None:
    parts = PackedParts(disk, LAYOUTS)
    parts.write(memoryview(SLAB))
    assert names(disk.places.files) == sorted(f".{layout.digest.hex}" for layout in LAYOUTS)
    await parts.commit()
    parts.close()

    for content, layout in zip(FILES, LAYOUTS, strict=True):
        path = disk.places.file(layout.digest)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o444
    assert names(disk.places.filling) == []


async def test_a_part_that_another_layout_had_begun_goes_and_others_parts_stay(disk: CacheDirectory) -> None:
    for path in (disk.places.part(LAYOUTS[0].digest), disk.places.bitmap(LAYOUTS[0].digest), disk.places.part(EMPTY)):
        path.write_bytes(b"half")
    parts = PackedParts(disk, LAYOUTS)
    parts.write(memoryview(SLAB))
    await parts.commit()
    assert names(disk.places.filling) == [disk.places.part(EMPTY).name]


@pytest.mark.parametrize("count", [2, len(FILES)], ids=["one by one", "together"])
async def test_no_file_is_visible_before_its_bytes_and_folders_were_synced(
    disk: CacheDirectory, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    files = LAYOUTS[:count]
    steps: list[tuple[set[str], int]] = []
    real = disk.sync.sync

    async def note(paths: Sequence[str], mark: int) -> None:
        steps.append((set(paths), len(visible(disk.places))))
        await real(paths, mark)

    monkeypatch.setattr(disk.sync, "sync", note)
    parts = PackedParts(disk, files)
    parts.write(memoryview(SLAB))
    await parts.commit()

    (before, visible_before), (after, visible_after) = steps
    assert (visible_before, visible_after) == (0, count)
    assert before == {f"{disk.places.files}/{temporary_name(layout.digest)}" for layout in files}
    assert after == {str(disk.places.file(layout.digest).parent) for layout in files}


async def test_bytes_are_counted_until_their_files_are_whole_or_gone(disk: CacheDirectory) -> None:
    for is_committed in (True, False):
        parts = PackedParts(disk, LAYOUTS)
        parts.write(memoryview(SLAB))
        assert disk.unnamed.size == len(SLAB)
        if is_committed:
            await parts.commit()
        parts.close()
        assert disk.unnamed.size == 0


async def test_a_file_that_is_not_where_the_layout_says_is_named_and_nothing_of_the_slab_is_written(
    disk: CacheDirectory,
) -> None:
    lies = LAYOUTS[7].slice
    assert lies is not None
    lying = replace(LAYOUTS[7], slice=Slice(lies.slab, lies.slab_size, lies.offset - 1))
    parts = PackedParts(disk, [*LAYOUTS[:7], lying])
    with pytest.raises(InternalError, match=f"the layout of file {lying.digest} is wrong"):
        parts.write(memoryview(SLAB))
    assert names(disk.places.filling) == names(disk.places.files) == []


async def test_what_an_earlier_attempt_left_is_written_anew(disk: CacheDirectory) -> None:
    (disk.places.files / temporary_name(LAYOUTS[0].digest)).write_bytes(b"something longer than the file ever was")
    parts = PackedParts(disk, LAYOUTS)
    parts.write(memoryview(SLAB))
    await parts.commit()
    assert disk.places.file(LAYOUTS[0].digest).read_bytes() == FILES[0]


@pytest.mark.parametrize("failing", [1, 2], ids=["bytes", "names"])
async def test_after_a_sync_that_failed_nothing_counts_as_whole(
    disk: CacheDirectory, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    real, calls = disk.sync.sync, [0]

    async def fail(paths: Sequence[str], mark: int) -> None:
        calls[0] += 1
        if calls[0] == failing:
            raise DiskFailedError(str(disk.places.root), "Input/output error")
        await real(paths, mark)

    monkeypatch.setattr(disk.sync, "sync", fail)
    parts = PackedParts(disk, LAYOUTS)
    parts.write(memoryview(SLAB))
    with pytest.raises(DiskFailedError):
        await parts.commit()
    parts.close()
    assert not parts.is_committed
    assert names(disk.places.files) == visible(disk.places)
    assert len(visible(disk.places)) == (0 if failing == 1 else len(FILES))


async def test_a_disk_that_is_full_says_so_and_what_was_written_is_removed(
    disk: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "write_all", failing(errno.ENOSPC))
    parts = PackedParts(disk, LAYOUTS)
    with pytest.raises(DiskFailedError, match="files: No space left on device"):
        parts.write(memoryview(SLAB))
    parts.close()
    assert names(disk.places.files) == []
