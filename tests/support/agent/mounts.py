"""Real file systems for tests, mounted for the time of a block. They need root and the right to mount."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from node_agent.stage.view.exposure import can_bind, mounts_below, unbind


@cache
def may_mount() -> bool:
    """Whether this process may mount at all; asked where the tests run, because only trying tells."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        return can_bind(Path(folder))


needs_mounts = pytest.mark.skipif(not may_mount(), reason="mounting is not permitted here (needs root)")
needs_xfs = pytest.mark.skipif(
    not (may_mount() and shutil.which("mkfs.xfs")), reason="needs root and mkfs.xfs (apt install xfsprogs)"
)
needs_quota = pytest.mark.skipif(
    not (may_mount() and shutil.which("mkfs.btrfs")), reason="needs root and mkfs.btrfs (apt install btrfs-progs)"
)


@contextmanager
def mounted_tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A file system in memory that is soon full."""
    place.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        _run("umount", str(place))


@contextmanager
def mounted_xfs(place: Path, image: Path) -> Iterator[Path]:
    """A file system that can share blocks between files."""
    place.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(320 * 1024 * 1024)
    _run("mkfs.xfs", "-q", "-m", "reflink=1", str(image))
    _run("mount", "-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        _run("umount", str(place))


@contextmanager
def mounted_quota(place: Path, image: Path, limit: str) -> Iterator[Path]:
    """A directory of a file system with much room, of which it may have ``limit``."""
    place.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(256 * 1024 * 1024)
    _run("mkfs.btrfs", "-q", str(image))
    _run("mount", "-o", "loop", str(image), str(place))
    try:
        _run("btrfs", "subvolume", "create", str(place / "limited"))
        _run("btrfs", "quota", "enable", str(place))
        _run("btrfs", "qgroup", "limit", limit, str(place / "limited"))
        yield place / "limited"
    finally:
        _run("umount", str(place))


@contextmanager
def unmounting(folder: Path) -> Iterator[None]:
    """Whatever a failed test leaves mounted below the folder goes when the block ends."""
    try:
        yield
    finally:
        for place in mounts_below(folder):
            unbind(place)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """The directory, bound over itself and read-only."""
    _run("mount", "--bind", str(place), str(place))
    try:
        _run("mount", "-o", "remount,bind,ro", str(place))
        yield
    finally:
        _run("umount", str(place))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
