"""A chunk in a directory survives a power cut: what is synced, and in which order."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.chunk import digest_of
from bdn.core.errors import StoreUnavailableError
from bdn.store.directory import DirectoryStore

CONTENT = b"the bytes of a chunk"
CHUNK = digest_of(CONTENT)
PLACE = f"chunks/{CHUNK.fanout}"
FIRST, SECOND = CHUNK.hex[:2], CHUNK.hex[2:4]


class Recorder:
    """Every step that matters for durability, with paths relative to ``root``, in order."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root.resolve()
        self.steps: list[str] = []
        self.before: dict[str, Callable[[], None]] = {}  # called before the step is done; may raise
        fsync, fdatasync, rename, mkdir = os.fsync, os.fdatasync, os.rename, os.mkdir

        def note(step: str) -> None:
            self.before.get(step, lambda: None)()
            self.steps.append(step)

        def noted_fsync(descriptor: int) -> None:
            note(f"fsync {self._opened(descriptor)}")
            fsync(descriptor)

        def noted_fdatasync(descriptor: int) -> None:
            note(f"fdatasync {self._opened(descriptor)}")
            fdatasync(descriptor)

        def noted_rename(source: Path, target: Path) -> None:
            note(f"rename {self._name(source)} to {self._name(target)}")
            rename(source, target)

        def noted_mkdir(path: Path, mode: int = 0o777) -> None:
            if not path.exists():
                note(f"mkdir {self._name(path)}")
            mkdir(path, mode)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "fdatasync", noted_fdatasync)
        monkeypatch.setattr(os, "rename", noted_rename)
        monkeypatch.setattr(os, "mkdir", noted_mkdir)

    def _opened(self, descriptor: int) -> str:
        return self._name(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _name(self, path: Path) -> str:
        name = path.resolve().relative_to(self.root).as_posix()
        return "incoming/*" if name.startswith("incoming/") else name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_data_is_synced_before_it_has_its_name_and_every_folder_after_it_got_an_entry(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(root)
    recorder = Recorder(root, monkeypatch)
    store.put(CHUNK, memoryview(CONTENT))
    assert recorder.steps == [
        "fdatasync incoming/*", f"mkdir chunks/{FIRST}", "fsync chunks", f"mkdir chunks/{FIRST}/{SECOND}",
        f"fsync chunks/{FIRST}", f"rename incoming/* to {PLACE}", f"fsync chunks/{FIRST}/{SECOND}",
    ]  # fmt: skip


def test_the_folder_of_the_chunks_is_itself_durable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(root.parent, monkeypatch)
    DirectoryStore(root)
    steps = [step for step in recorder.steps if "incoming" not in step]
    made = ["mkdir store", "fsync .", "mkdir store/chunks", "fsync store"]
    assert steps == [*made, "mkdir store/aside", "fsync store"]


def test_who_finds_a_chunk_that_another_is_just_putting_makes_it_durable_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renames; B finds the file and returns, and its caller notes the chunk as held; power fails; A never synced."""
    store, other = DirectoryStore(root), DirectoryStore(root)
    recorder = Recorder(root, monkeypatch)
    folder_synced = f"fsync chunks/{FIRST}/{SECOND}"
    during: list[str] = []

    def put_the_same() -> None:
        recorder.before.clear()
        steps_before = len(recorder.steps)
        other.put(CHUNK, memoryview(CONTENT))
        during.extend(recorder.steps[steps_before:])

    recorder.before[folder_synced] = put_the_same
    store.put(CHUNK, memoryview(CONTENT))
    assert during == [folder_synced]


def test_a_put_whose_last_sync_fails_can_be_repeated_and_then_is_durable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(root)
    recorder = Recorder(root, monkeypatch)
    folder_synced = f"fsync chunks/{FIRST}/{SECOND}"

    def fail() -> None:
        recorder.before.clear()
        raise OSError(5, "Input/output error")

    recorder.before[folder_synced] = fail
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.put(CHUNK, memoryview(CONTENT))
    recorder.steps.clear()
    store.put(CHUNK, memoryview(CONTENT))
    assert folder_synced in recorder.steps


@pytest.mark.parametrize(
    "step", ["fdatasync incoming/*", f"mkdir chunks/{FIRST}", "fsync chunks", f"rename incoming/* to {PLACE}"]
)
def test_a_step_that_fails_before_the_chunk_has_its_name_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store = DirectoryStore(root)
    recorder = Recorder(root, monkeypatch)

    def fail() -> None:
        raise OSError(5, "Input/output error")

    recorder.before[step] = fail
    with pytest.raises(StoreUnavailableError, match="Input/output error"):
        store.put(CHUNK, memoryview(CONTENT))
    assert list((root / "incoming").iterdir()) == []
    assert not (root / PLACE).exists()
