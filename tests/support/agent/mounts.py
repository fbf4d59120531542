"""Real file systems for tests, mounted for the time of a block. They need root and the right to mount."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest

from bdn.disk.binding import can_bind, mounts_below, unbind
from node_agent.job.bounds import can_make_images


@cache
def may_mount() -> bool:
    """Whether this process may mount at all; asked where the tests run, because only trying tells."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        return can_bind(Path(folder))


@cache
def may_mount_images() -> bool:
    """Whether job volumes can be file systems of their own here."""
    if not may_mount():
        return False
    with tempfile.TemporaryDirectory() as folder:
        return can_make_images(Path(folder))


needs_images = pytest.mark.skipif(
    not may_mount_images(), reason="no image can be mounted here (needs root, loop devices and mkfs.ext4)"
)
needs_mounts = pytest.mark.skipif(not may_mount(), reason="mounting is not permitted here (needs root)")
needs_xfs = pytest.mark.skipif(
    not (may_mount() and shutil.which("mkfs.xfs")), reason="needs root and mkfs.xfs (apt install xfsprogs)"
)
needs_quota = pytest.mark.skipif(
    not (may_mount() and shutil.which("mkfs.btrfs")), reason="needs root and mkfs.btrfs (apt install btrfs-progs)"
)


@contextmanager
def mounted(place: Path, *what: str) -> Iterator[Path]:
    """What ``mount`` takes: options and a device."""
    place.mkdir(parents=True, exist_ok=True)
    _run("mount", *what, str(place))
    try:
        yield place
    finally:
        _run("umount", str(place))


def mounted_tmpfs(place: Path, size: str) -> AbstractContextManager[Path]:
    """A file system in memory that is soon full."""
    return mounted(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def mounted_xfs(place: Path, image: Path) -> AbstractContextManager[Path]:
    """A file system that can share blocks between files."""
    _image(image, 320, "mkfs.xfs", "-q", "-m", "reflink=1")
    return mounted(place, "-o", "loop", str(image))


@contextmanager
def mounted_quota(place: Path, image: Path, limit: str) -> Iterator[Path]:
    """A directory of a file system with much room, of which it may have ``limit``."""
    _image(image, 256, "mkfs.btrfs", "-q")
    with mounted(place, "-o", "loop", str(image)):
        _run("btrfs", "subvolume", "create", str(place / "limited"))
        _run("btrfs", "quota", "enable", str(place))
        _run("btrfs", "qgroup", "limit", limit, str(place / "limited"))
        yield place / "limited"


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
    """Nobody may write there: it is bound over itself, as no mode stops root, or made so by its mode, where nobody is root."""
    if os.geteuid() == 0:
        if not may_mount():
            pytest.skip("mounting is not permitted here")
        with mounted(place, "--bind", str(place)):
            _run("mount", "-o", "remount,bind,ro", str(place))
            yield
        return
    modes = {path: path.stat().st_mode for path in (place, *place.rglob("*")) if path.is_dir()}
    for path in modes:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def _image(image: Path, megabytes: int, *mkfs: str) -> None:
    with image.open("wb") as file:
        file.truncate(megabytes * 1024 * 1024)
    _run(*mkfs, str(image))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
