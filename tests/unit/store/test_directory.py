"""A DirectoryStore on its disk: what it leaves there, what is synced when, and what it makes of a disk that fails, a crash or damage."""

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.core.store import NotDeletedError
from bdn.disk.direct import LEAST_BYTES
from bdn.store.directory import KEPT, DirectoryStore
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts, read_only
from tests.support.content.memory_store import content_of
from tests.support.content.names import named
from tests.support.crash.rot import HOW, rot
from tests.support.crash.scripted_writes import Writes, aligned

CONTENT = b"the bytes of a chunk"
CHUNK = digest_of(CONTENT)
PLACE = f"chunks/{CHUNK.fanout}"
FIRST, SECOND = CHUNK.hex[:2], CHUNK.hex[2:4]
FOLDER_SYNCED = f"fsync chunks/{FIRST}/{SECOND}"
LARGE = bytes(range(256)) * (LEAST_BYTES // 256 + mmap.PAGESIZE // 256)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    return DirectoryStore(root)


@pytest.fixture
def kept(store: DirectoryStore) -> DirectoryStore:
    """A store that holds the chunk."""
    store.put(CHUNK, memoryview(CONTENT))
    return store


@pytest.fixture
def path(root: Path) -> Path:
    """Where the chunk lies."""
    return root / PLACE


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
    assert files_below(root) == [PLACE]
    assert stat.S_IMODE((root / "chunks" / CHUNK.fanout).stat().st_mode) == 0o444


@pytest.mark.usefixtures("kept")
def test_what_a_crash_left_half_written_is_cleared_and_no_chunk_with_it(root: Path) -> None:
    (root / "incoming" / "4711-aabbccdd-0").write_bytes(CONTENT[:3])
    (root / "incoming" / "4711-aabbccdd-1").write_bytes(b"")
    assert DirectoryStore(root).drop_leftovers(0, dry_run=False) == (0, 0)
    assert DirectoryStore(root).drop_leftovers(float("inf"), dry_run=True) == (2, 3)
    assert DirectoryStore(root).drop_leftovers(float("inf"), dry_run=False) == (2, 3)
    assert files_below(root) == [PLACE]


def test_a_write_that_the_kernel_cuts_short_is_continued(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, offset: write(descriptor, content[:7], offset))
    store.put(CHUNK, memoryview(CONTENT))
    assert content_of(store, CHUNK) == CONTENT


def test_a_disk_that_fills_up_in_the_middle_of_a_chunk_is_an_error_that_may_pass(
    store: DirectoryStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def fill_up(descriptor: int, content: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:7], offset)

    monkeypatch.setattr(os, "pwrite", fill_up)
    with pytest.raises(StoreUnavailableError, match="No space left on device") as raised:
        store.put(CHUNK, memoryview(CONTENT))
    assert raised.value.transient
    assert files_below(root) == []


@needs_mounts
def test_a_disk_that_is_really_full_leaves_nothing_half_written_and_keeps_what_it_held(root: Path) -> None:
    with mounted_tmpfs(root, "4m"):
        store = DirectoryStore(root)
        store.put(CHUNK, memoryview(CONTENT))
        too_much = os.urandom(CHUNK_SIZE)
        with pytest.raises(StoreUnavailableError, match="No space left on device"):
            store.put(digest_of(too_much), memoryview(too_much))
        assert files_below(root) == [PLACE]
        store.put(named("small"), memoryview(b"there is room for this again"))


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put(named("new"), memoryview(b"new")),
        lambda store: store.delete([CHUNK]),
        lambda store: store.drop_leftovers(float("inf"), dry_run=False),
    ],
    ids=["put", "delete", "drop_leftovers"],
)
def test_a_directory_that_may_not_be_written_is_an_unavailable_store(
    kept: DirectoryStore, root: Path, act: Callable[[DirectoryStore], object]
) -> None:
    (root / "incoming" / "leftover").write_bytes(b"")
    with read_only(root):
        with pytest.raises(StoreUnavailableError, match=f"{root}: "):
            act(kept)
        assert content_of(kept, CHUNK) == CONTENT


@pytest.mark.parametrize("lost", ["store", "store/chunks"])
def test_a_store_that_is_gone_does_not_say_that_it_never_held_the_chunk_or_that_it_is_damaged(
    kept: DirectoryStore, root: Path, lost: str
) -> None:
    """Its disk is not mounted: whoever heard NOT_FOUND would give up a chunk that is safe."""
    (root.parent / lost).rename(root.parent / "elsewhere")
    for ask in (
        lambda: kept.open(CHUNK),
        lambda: kept.fault(CHUNK),
        lambda: list(kept.listed()),
        lambda: kept.delete([CHUNK]),
    ):
        with pytest.raises(StoreUnavailableError, match="No such file or directory"):
            ask()


def test_a_directory_that_cannot_be_made_is_an_unavailable_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(StoreUnavailableError, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file" / "store")
    with pytest.raises(StoreUnavailableError, match=r"Not a directory|File exists"):
        DirectoryStore(tmp_path / "file")


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put(CHUNK, memoryview(CONTENT)),
        lambda store: store.open(CHUNK),
        lambda store: store.delete([CHUNK]),
    ],
    ids=["put", "open", "delete"],
)
def test_a_folder_that_is_no_folder_is_an_unavailable_store(
    store: DirectoryStore, root: Path, act: Callable[[DirectoryStore], object]
) -> None:
    """Something other than us wrote there: this is not "the chunk is absent"."""
    (root / "chunks" / CHUNK.hex[:2]).write_bytes(b"in the way")
    with pytest.raises(StoreUnavailableError):
        act(store)


class Recorder:
    """Every step that matters for durability, with paths relative to ``root``, in order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root.resolve()
        self.steps: list[str] = []
        self.before: dict[str, Callable[[], None]] = {}  # called before the step is done; may raise

        def note(name: str, step_of: Callable[..., str]) -> None:
            real = getattr(os, name)

            def noted(*given: Any) -> None:
                if step := step_of(*given):
                    self.before.get(step, lambda: None)()
                    self.steps.append(step)
                real(*given)

            monkeypatch.setattr(os, name, noted)

        note("fsync", lambda descriptor: f"fsync {self._opened(descriptor)}")
        note("fdatasync", lambda descriptor: f"fdatasync {self._opened(descriptor)}")
        note("rename", lambda source, target: f"rename {self._name(source)} to {self._name(target)}")
        note("unlink", lambda path: f"unlink {self._name(path)}")
        note("mkdir", lambda path, *_: "" if path.exists() else f"mkdir {self._name(path)}")

    def _opened(self, descriptor: int) -> str:
        return self._name(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _name(self, path: Path) -> str:
        name = path.resolve().relative_to(self.root).as_posix()
        return "incoming/*" if name.startswith("incoming/") else name

    def fail_once(self, step: str) -> None:
        def fail() -> None:
            self.before.clear()
            raise OSError(5, "Input/output error")

        self.before[step] = fail


@pytest.fixture
def recorder(root: Path, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(root, monkeypatch)


def test_data_is_synced_before_it_has_its_name_and_every_folder_after_it_got_an_entry(
    store: DirectoryStore, recorder: Recorder
) -> None:
    store.put(CHUNK, memoryview(CONTENT))
    assert recorder.steps == [
        "fdatasync incoming/*", f"mkdir chunks/{FIRST}", "fsync chunks", f"mkdir chunks/{FIRST}/{SECOND}",
        f"fsync chunks/{FIRST}", f"rename incoming/* to {PLACE}", f"fsync chunks/{FIRST}/{SECOND}",
    ]  # fmt: skip


def test_the_folder_of_the_chunks_is_itself_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(root.parent, monkeypatch)
    DirectoryStore(root)
    steps = [step for step in recorder.steps if "incoming" not in step]
    assert steps == ["mkdir store", "fsync .", "mkdir store/chunks", "fsync store"]


@pytest.mark.promise("collection")
def test_delete__names_go_before_folders_are_synced_and_absent_ones_count_too(
    store: DirectoryStore, recorder: Recorder
) -> None:
    """A killed mirror may have unlinked a file and not synced its folder; its row must not go before that is durable."""
    other = digest_of(b"other")
    for content in (CONTENT, b"other"):
        store.put(digest_of(content), memoryview(content))
    folders = [f"fsync chunks/{digest.hex[:2]}/{digest.hex[2:4]}" for digest in (CHUNK, other)]
    for _ in range(2):
        recorder.steps.clear()
        store.delete([CHUNK, other])
        assert recorder.steps == [f"unlink {PLACE}", f"unlink chunks/{other.fanout}", *folders]


@pytest.mark.promise("collection")
@pytest.mark.parametrize("step", [f"unlink {PLACE}", FOLDER_SYNCED])
def test_delete__disk_refuses_one_chunk__names_it_and_removes_the_others(
    store: DirectoryStore, recorder: Recorder, step: str
) -> None:
    other = digest_of(b"other")
    for content in (CONTENT, b"other"):
        store.put(digest_of(content), memoryview(content))
    recorder.fail_once(step)
    with pytest.raises(NotDeletedError, match="Input/output error") as caught:
        store.delete([CHUNK, other])
    assert caught.value.left == {CHUNK}
    assert other not in {one.digest for one in store.listed()}
    store.delete([CHUNK])
    assert list(store.listed()) == []


def test_a_put_whose_last_sync_fails_can_be_repeated_and_then_is_durable(
    store: DirectoryStore, recorder: Recorder
) -> None:
    recorder.fail_once(FOLDER_SYNCED)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.put(CHUNK, memoryview(CONTENT))
    recorder.steps.clear()
    store.put(CHUNK, memoryview(CONTENT))
    assert FOLDER_SYNCED in recorder.steps


@pytest.mark.parametrize(
    "step", ["fdatasync incoming/*", f"mkdir chunks/{FIRST}", "fsync chunks", f"rename incoming/* to {PLACE}"]
)
def test_a_step_that_fails_before_the_chunk_has_its_name_leaves_nothing(
    store: DirectoryStore, root: Path, recorder: Recorder, step: str
) -> None:
    recorder.fail_once(step)
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.put(CHUNK, memoryview(CONTENT))
    assert files_below(root) == []


def test_large_aligned_chunks_are_written_directly_and_one_unaligned_buffer_changes_nothing_for_the_next(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes.noted(monkeypatch)
    for content, kinds in [
        (aligned(LARGE), [True]),
        (aligned(LARGE[: LEAST_BYTES + 1]), [True, False]),
        (aligned(LARGE[: LEAST_BYTES - 1]), [False]),
        (aligned(b"xyz" + LARGE[:-1])[3:], [True, False]),
        (aligned(LARGE[mmap.PAGESIZE :]), [True]),
    ]:
        writes.seen.clear()
        store.put(digest_of(content), content)
        assert content_of(store, digest_of(content)) == content
        assert [is_direct for _, _, is_direct in writes.seen] == kinds


@pytest.mark.usefixtures("kept")
def test_what_is_no_chunk_keeps_nobody_from_opening_the_store_or_going_through_it(root: Path) -> None:
    stray = root / "chunks/aa/bb/.nfs0000000000a1b2c3"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.touch()

    assert [chunk.digest for chunk in DirectoryStore(root).listed()] == [CHUNK]
    assert stray.exists()


def test_a_folder_that_cannot_be_looked_into_is_not_passed_over_by_who_lists_all(
    kept: DirectoryStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the store would lack what is in it, and say that it lacks nothing."""
    listdir = os.listdir

    def refused(folder: Path) -> list[str]:
        if folder == path.parent:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        list(kept.listed())


# --- a disk that changed its bytes ---


def evidence(root: Path) -> list[Path]:
    return sorted((root / "quarantine").glob("*"))


def test_a_right_chunk_has_no_fault_and_is_not_set_aside(kept: DirectoryStore, path: Path) -> None:
    assert kept.fault(CHUNK) is None
    assert not kept.set_aside(CHUNK)
    assert path.read_bytes() == CONTENT
    assert kept.evidence() == 0


@pytest.mark.parametrize("how", HOW)
def test_every_damage_is_a_fault_and_only_a_wrong_file_is_evidence_until_it_is_put_again(
    kept: DirectoryStore, path: Path, root: Path, how: str
) -> None:
    rot(path, how)
    found = path.read_bytes() if how not in ("absent", "unreadable") else None
    assert kept.fault(CHUNK) is not None
    assert kept.set_aside(CHUNK) == (how != "absent")
    kept.put(CHUNK, memoryview(CONTENT))
    assert path.read_bytes() == CONTENT
    assert kept.fault(CHUNK) is None
    assert kept.evidence() == (how != "absent")
    assert [file.read_bytes() for file in evidence(root) if found is not None] == ([found] if found else [])


def test_a_file_longer_than_any_chunk_is_not_read_to_its_end(kept: DirectoryStore, path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert kept.fault(CHUNK) == "it is larger than a chunk can be"
    assert CHUNK_SIZE < 1 << 40


def test_of_much_evidence_the_oldest_goes(kept: DirectoryStore, path: Path, root: Path) -> None:
    for number in range(KEPT + 3):
        path.unlink(missing_ok=True)
        path.write_bytes(b"wrong %d" % number)
        assert kept.set_aside(CHUNK)
    assert kept.evidence() == KEPT
    assert evidence(root)[0].read_bytes() == b"wrong 3"
    assert evidence(root)[-1].read_bytes() == b"wrong %d" % (KEPT + 2)


def test_a_chunk_that_is_replaced_while_it_is_read_is_no_evidence(
    kept: DirectoryStore, path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sees wrong bytes; B puts right ones; A takes what is there now."""
    rot(path, "flipped")
    link = Path.hardlink_to

    def put_first(taken: Path, target: Path) -> None:
        kept.put(CHUNK, memoryview(CONTENT))
        link(taken, target)

    monkeypatch.setattr(Path, "hardlink_to", put_first)
    assert not kept.set_aside(CHUNK)
    assert path.read_bytes() == CONTENT
    assert evidence(root) == []


@pytest.mark.parametrize("above", [0, 1], ids=["folder", "folder above"])
def test_a_folder_that_is_none_is_damage_of_what_was_in_it_until_it_is_taken_away(
    kept: DirectoryStore, path: Path, tmp_path: Path, above: int
) -> None:
    broken = path.parents[above]
    broken.rename(tmp_path / "folder")
    broken.touch()
    assert kept.fault(CHUNK) == "it cannot be read (Not a directory)"
    for attempt in (lambda: kept.put(CHUNK, memoryview(CONTENT)), lambda: kept.set_aside(CHUNK)):
        with pytest.raises(StoreUnavailableError, match=r"Not a directory|File exists"):
            attempt()
    broken.unlink()
    assert kept.fault(CHUNK) == "it is absent"
    kept.put(CHUNK, memoryview(CONTENT))
    assert kept.fault(CHUNK) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("is_whole", [False, True], ids=["one folder", "the store"])
def test_a_folder_that_cannot_be_looked_into_is_damage_if_the_store_can_and_the_disk_means_it(
    kept: DirectoryStore, path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_whole: bool
) -> None:
    broken = root if is_whole else path.parent.parent

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
                kept.fault(CHUNK)
        else:
            assert kept.fault(CHUNK) == f"it cannot be read ({os.strerror(number)})"


def test_where_all_chunks_should_be_there_is_a_file_and_that_is_no_damage_of_each(
    kept: DirectoryStore, path: Path, tmp_path: Path
) -> None:
    chunks = path.parents[2]
    chunks.rename(tmp_path / "elsewhere")
    chunks.touch()
    with pytest.raises(StoreUnavailableError, match="Not a directory"):
        kept.fault(CHUNK)
