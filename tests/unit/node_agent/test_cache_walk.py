"""A summary of a cache is what ``find`` says, whatever jobs made there."""

import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from bdn.core.errors import CanceledError, DiskFailedError
from bdn.wire.cache_schema import FileSummary
from node_agent.job.cache_walk import summarized

KINDS = {"f": "file", "d": "directory", "l": "symlink"}


@pytest.fixture(name="root")
def a_cache(tmp_path: Path) -> Path:
    """With whatever ``find`` distinguishes."""
    root = tmp_path / "cache"
    for path in ("user_artifacts/a/b", "user_artifacts/empty", "huggingface/ü n\n\tx"):
        (root / path).mkdir(parents=True)
    for number, path in enumerate(("user_artifacts/x", "user_artifacts/a/b/y", "huggingface/ü n\n\tx/z")):
        (root / path).write_bytes(b"x" * number * 1000)
        (root / path).chmod((0o4755, 0o1644, 0)[number])
        os.utime(root / path, (0, 1_700_000_000.25 + number))
    (root / "user_artifacts/hard").hardlink_to(root / "user_artifacts/a/b/y")
    (root / "user_artifacts/out").symlink_to("/etc")
    (root / "user_artifacts/loop").symlink_to(".")
    os.mkfifo(root / "user_artifacts/fifo")
    os.utime(root / "user_artifacts/empty", (0, -5))
    return root


def summary(root: Path) -> list[FileSummary]:
    return [FileSummary.of(entry) for entry in summarized(root, threading.Event()).entries()]


def test_a_summary_equals_find(root: Path) -> None:
    if shutil.which("find") is None:
        pytest.skip("there is no find")
    form = r"%P\0%s\0%T@\0%y\0%M\0"
    told = subprocess.run(["find", root, "-mindepth", "1", "-printf", form], check=True, capture_output=True).stdout
    fields = told.decode().split("\0")[:-1]
    expected = list[Any]()
    for path, size, modified, kind, permissions in zip(*[iter(fields)] * 5, strict=True):
        if kind in KINDS:
            modified_at = pytest.approx(float(modified), abs=0.001)
            expected.append((path, int(size) if kind != "d" else 0, KINDS[kind], permissions, modified_at))

    found = [
        (one.path, one.size_bytes, one.file_type, one.permissions, one.modified.timestamp()) for one in summary(root)
    ]
    assert sorted(found) == sorted(expected, key=lambda one: one[0])
    assert len(found) == 12


def test_what_is_not_unicode_has_its_bytes_written_out(root: Path) -> None:
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    assert r"\xff\xfe" in [one.path for one in summary(root)]


def test_a_chain_of_folders_without_end_has_one(root: Path) -> None:
    folder = os.open(root, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("x", dir_fd=folder)
        below = os.open("x", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    assert max(one.path.count("/") for one in summary(root)) == 128


def test_a_folder_that_becomes_a_link_is_not_walked_through(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def swapping(path: object, *given: object, **options: object) -> int:
        if path == "a" and not (root / "user_artifacts/a").is_symlink():
            (root / "user_artifacts/a").rename(root.parent / "kept")
            (root / "user_artifacts/a").symlink_to("/etc")
        return real(path, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", swapping)
    assert not [one.path for one in summary(root) if one.path.startswith("user_artifacts/a/")]


def test_a_walk_is_given_up_and_what_is_not_there_is_told(root: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(CanceledError):
        summarized(root, stop)
    with pytest.raises(DiskFailedError):
        summarized(root / "absent", threading.Event())
