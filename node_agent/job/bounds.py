"""Directories that a job writes, bounded in size."""

import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bdn.core.errors import DiskFailedError
from bdn.disk.binding import is_mount_point, unbind
from bdn.disk.durable import disk_errors, make_folder, opened
from bdn.wire.job_schema import LEAST_BYTES, Bound

logger = logging.getLogger(__name__)

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPTIONS: Final = "nosuid,nodev,noatime,discard,noinit_itable,errors=remount-ro"
_PROGRAMS: Final = ("mkfs.ext4", "losetup", "mount")
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_DEEPEST: Final = 256  # folders; each stays open while its children are counted
_PRIVATE: Final = 0o700  # /proc/self/mountinfo shows the path to every user of the machine


@dataclass(frozen=True, slots=True)
class VolumeOwner:
    """Owner and group of a folder. None: the agent's own."""

    uid: int | None = None
    gid: int | None = None

    def take_over(self, folder: Path) -> None:
        """Set mode 0700 and chown. The parent belongs to the agent, so the folder is not a link. Raises ``OSError``."""
        folder.chmod(_PRIVATE)
        os.chown(folder, -1 if self.uid is None else self.uid, -1 if self.gid is None else self.gid)


@dataclass
class BoundedFolder:
    """A folder at ``place`` with mode 0700. Blocking. Methods raise ``DiskFailedError``.

    As an image, the folder is an ext4 file system in a sparse file beside ``place``; deleting files returns their
    blocks to the disk. ``is_kept``: the content must survive a power cut, so the image has a journal.
    """

    place: Path
    size: int
    bound: Bound
    is_kept: bool
    owner: VolumeOwner = VolumeOwner()
    _used: int | None = field(default=None, init=False)

    @property
    def image(self) -> Path:
        return self.place.with_name(f"{self.place.name}.img")

    def open(self) -> None:
        """Create the folder, or reuse the one that an earlier agent left, also after a crash or reboot."""
        with disk_errors(self.place):
            make_folder(self.place, _PRIVATE)
            if self.bound == "watch":
                self.owner.take_over(self.place)
            elif not is_mount_point(self.place):
                if not self.image.exists():
                    self._make_image()
                self._mount()
        self.look()

    def close(self) -> None:
        """Unmount the image, and free its loop device. Files that are already open stay usable."""
        if self.bound == "image":
            with disk_errors(self.place):
                note = unbind(self.place)
                if self.image.exists():
                    self._detach()
            if note:
                logger.warning("%s", note)

    def look(self) -> int | None:
        """Measure the bytes in use. Returns None if they cannot be counted.

        A watched folder costs a walk over all files.
        """
        with disk_errors(self.place):
            if self.bound == "image":
                found = os.statvfs(self.place)
                self._used = (found.f_blocks - found.f_bfree) * found.f_frsize
            else:
                self._used = _bytes_below(self.place)
        return self._used

    @property
    def used(self) -> int | None:
        return self._used

    @property
    def is_exceeded(self) -> bool:
        return self._used is None or self._used > self.size

    def occupied(self) -> int:
        if self.bound == "watch":
            return self.size if self._used is None else self._used
        with suppress(OSError):
            return self.image.stat().st_blocks * 512
        return 0

    def _make_image(self) -> None:
        aside = self.image.with_suffix(".new")
        with opened(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            os.ftruncate(descriptor, self.size)
        journal = () if self.is_kept else ("-O", "^has_journal")
        _run(
            "mkfs.ext4",
            "-q",
            "-F",
            "-m",
            "0",
            *journal,
            "-E",
            "lazy_itable_init=1,lazy_journal_init=1,nodiscard",
            str(aside),
        )
        with opened(aside, os.O_RDONLY) as descriptor:
            os.fsync(descriptor)
        aside.replace(self.image)

    def _mount(self) -> None:
        self._detach()
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(self.image)).strip()
        try:
            _run("mount", "-t", "ext4", "-o", _OPTIONS, device, str(self.place))
        finally:
            _run("losetup", "--detach", device)  # the mount keeps the device until it is unmounted
        with suppress(OSError):
            (self.place / "lost+found").rmdir()
        self.owner.take_over(self.place)

    def _detach(self) -> None:
        """Detach loop devices that an agent left that was killed in ``_mount``. The others are freed by the kernel."""
        found = _run("losetup", "--noheadings", "--output", "NAME,AUTOCLEAR", "--associated", str(self.image))
        for line in found.splitlines():
            device, is_freed_alone = line.split()
            if is_freed_alone == "0":
                _run("losetup", "--detach", device)


def can_make_images(folder: Path) -> bool:
    """Mount a probe image below ``folder``: checking for rights, devices and seccomp filters is unreliable."""
    if os.geteuid() != 0 or not all(shutil.which(program, path=_SYSTEM_PATH) for program in _PROGRAMS):
        return False
    probe = BoundedFolder(folder / ".probe", LEAST_BYTES, "image", is_kept=False)
    try:
        probe.open()
    except DiskFailedError as error:
        logger.info("cannot mount images (%s); measuring job volumes periodically instead", error)
        return False
    finally:
        with suppress(OSError, DiskFailedError):
            probe.close()
            probe.image.unlink(missing_ok=True)
            probe.image.with_suffix(".new").unlink(missing_ok=True)
            probe.place.rmdir()
    return True


def _run(program: str, *arguments: str) -> str:
    """Returns stdout. Raises ``OSError`` with the last line of stderr."""
    found = shutil.which(program, path=_SYSTEM_PATH)
    if found is None:
        raise OSError(f"{program} is not installed")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)  # noqa: S603 - no shell, and no argument comes from a job
    if done.returncode:
        raise OSError(f"{program}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return done.stdout


def _bytes_below(root: Path) -> int | None:
    """Bytes allocated to files and folders; hard links count once, links are not followed.

    Files deleted during the walk may count or not. Returns None if a part cannot be counted.
    """
    counted: set[tuple[int, int]] = set()
    total = 0
    with ExitStack() as stack:
        try:
            top = stack.enter_context(opened(root, os.O_RDONLY | os.O_DIRECTORY))
        except PermissionError:  # the owner may remove its own permissions
            return None
        for found in _below(top, 0):
            if found is None:
                return None
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if (found.st_dev, found.st_ino) in counted:
                    continue
                counted.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total


def entries_below(root: Path) -> Iterator[os.stat_result | None]:
    """All files and folders; no link is followed. Yields None if a part cannot be counted. Raises ``OSError``."""
    with opened(root, os.O_RDONLY | os.O_DIRECTORY) as top:
        yield from _below(top, 0)


def _below(folder: int, depth: int) -> Iterator[os.stat_result | None]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:  # a folder with r but without x
                yield None
                return
            yield found
            if stat.S_ISDIR(found.st_mode):
                yield from _inside(folder, entry.name, depth + 1)


def _inside(folder: int, name: str, depth: int) -> Iterator[os.stat_result | None]:
    """Yields None if a part cannot be counted."""
    with ExitStack() as stack:
        try:
            below = stack.enter_context(opened(name, _FOLDER, folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # swapped by the job
        except OSError:
            yield None
            return
        if depth >= _DEEPEST:
            yield None
            return
        yield from _below(below, depth)
