import errno
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bdn.core.chunk import EMPTY, FileLayout, Slice
from bdn.core.errors import DiskFailedError, InternalError
from node_agent.disk.cache_directory import UnnamedBytes
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places, temporary_name
from node_agent.fill import part
from node_agent.fill.part import PackedParts
from tests.support.mirror.slabs import pack

FILES = [f"small file {number}".encode() for number in range(12)]
((_, SLAB, LAYOUTS),) = pack(FILES)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path)
    places.make()
    return places


@pytest.fixture
def sync(places: Places) -> Iterator[GroupSync]:
    with GroupSync(places.root) as sync:
        yield sync


def parts_of(places: Places, sync: GroupSync, files: Sequence[FileLayout] = LAYOUTS) -> PackedParts:
    return PackedParts(places, sync, UnnamedBytes(), files)


def visible(places: Places) -> set[str]:
    return {name for name in names(places.files) if not name.startswith(".")}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def test_the_files_of_a_slab_appear_read_only_under_their_names_and_leave_nothing_else(
    places: Places, sync: GroupSync
) -> None:
    parts = parts_of(places, sync)
    parts.write(memoryview(SLAB))
    assert names(places.files) == {f".{layout.digest.hex}" for layout in LAYOUTS}
    await parts.commit()
    parts.close()

    for content, layout in zip(FILES, LAYOUTS, strict=True):
        path = places.file(layout.digest)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o444
    assert names(places.filling) == set()


async def test_a_part_that_another_layout_had_begun_goes_and_others_parts_stay(places: Places, sync: GroupSync) -> None:
    for path in (places.part(LAYOUTS[0].digest), places.bitmap(LAYOUTS[0].digest), places.part(EMPTY)):
        path.write_bytes(b"half")
    parts = parts_of(places, sync)
    parts.write(memoryview(SLAB))
    await parts.commit()
    assert names(places.filling) == {places.part(EMPTY).name}


@pytest.mark.parametrize("count", [2, len(FILES)], ids=["one by one", "together"])
async def test_no_file_is_visible_before_its_bytes_and_folders_were_synced(
    places: Places, sync: GroupSync, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    files = LAYOUTS[:count]
    steps: list[tuple[set[str], int]] = []
    real = sync.sync

    async def note(paths: Sequence[str], mark: int) -> None:
        steps.append((set(paths), len(visible(places))))
        await real(paths, mark)

    monkeypatch.setattr(sync, "sync", note)
    parts = parts_of(places, sync, files)
    parts.write(memoryview(SLAB))
    await parts.commit()

    (before, visible_before), (after, visible_after) = steps
    assert (visible_before, visible_after) == (0, count)
    assert before == {f"{places.files}/{temporary_name(layout.digest)}" for layout in files}
    assert after == {str(places.file(layout.digest).parent) for layout in files}


async def test_bytes_are_counted_until_their_files_are_whole_or_gone(places: Places, sync: GroupSync) -> None:
    aside = UnnamedBytes()
    for is_committed in (True, False):
        parts = PackedParts(places, sync, aside, LAYOUTS)
        parts.write(memoryview(SLAB))
        assert aside.size == len(SLAB)
        if is_committed:
            await parts.commit()
        parts.close()
        assert aside.size == 0


async def test_a_file_that_is_not_where_the_layout_says_is_named_and_nothing_of_the_slab_is_written(
    places: Places, sync: GroupSync
) -> None:
    lies = LAYOUTS[7].slice
    assert lies is not None
    lying = replace(LAYOUTS[7], slice=Slice(lies.slab, lies.slab_size, lies.offset - 1))
    parts = parts_of(places, sync, [*LAYOUTS[:7], lying])
    with pytest.raises(InternalError, match=f"the layout of file {lying.digest} is wrong"):
        parts.write(memoryview(SLAB))
    assert names(places.filling) == names(places.files) == set()


async def test_what_an_earlier_attempt_left_is_written_anew(places: Places, sync: GroupSync) -> None:
    (places.files / temporary_name(LAYOUTS[0].digest)).write_bytes(b"something longer than the file ever was")
    parts = parts_of(places, sync)
    parts.write(memoryview(SLAB))
    await parts.commit()
    assert places.file(LAYOUTS[0].digest).read_bytes() == FILES[0]


@pytest.mark.parametrize("failing", [1, 2], ids=["bytes", "names"])
async def test_after_a_sync_that_failed_nothing_counts_as_whole(
    places: Places, sync: GroupSync, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    real, calls = sync.sync, [0]

    async def fail(paths: Sequence[str], mark: int) -> None:
        calls[0] += 1
        if calls[0] == failing:
            raise DiskFailedError(str(places.root), "Input/output error")
        await real(paths, mark)

    monkeypatch.setattr(sync, "sync", fail)
    parts = parts_of(places, sync)
    parts.write(memoryview(SLAB))
    with pytest.raises(DiskFailedError):
        await parts.commit()
    parts.close()
    assert not parts.is_committed
    assert names(places.files) == visible(places)
    assert len(visible(places)) == (0 if failing == 1 else len(FILES))


async def test_a_disk_that_is_full_says_so_and_what_was_written_is_removed(
    places: Places, sync: GroupSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(part, "write_all", full)
    parts = parts_of(places, sync)
    with pytest.raises(DiskFailedError, match="files: No space left on device"):
        parts.write(memoryview(SLAB))
    parts.close()
    assert names(places.files) == set()
