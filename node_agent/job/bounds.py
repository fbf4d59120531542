"""Directories that a job writes, and that hold no more than they may."""

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
from bdn.disk.durable import disk_errors, make_folder, opened
from bdn.wire.job_schema import LEAST_BYTES, Bound
from node_agent.stage.view.exposure import is_mount_point, unbind

logger = logging.getLogger(__name__)

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPTIONS: Final = "nosuid,nodev,noatime,discard,noinit_itable,errors=remount-ro"
_PROGRAMS: Final = ("mkfs.ext4", "losetup", "mount")
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_DEEPEST: Final = 256  # folders, each of which is open while those in it are counted
_PRIVATE: Final = 0o700  # /proc/self/mountinfo shows the path to every user of the machine


@dataclass(frozen=True, slots=True)
class Owner:
    """The user that writes a folder, and the folder's group. None: the agent's own."""

    uid: int | None = None
    gid: int | None = None

    def take_over(self, folder: Path) -> None:
        """Give the folder to this user, with mode 0700; its parent is the agent's, so it is not a link. Raises ``OSError``."""
        folder.chmod(_PRIVATE)
        os.chown(folder, -1 if self.uid is None else self.uid, -1 if self.gid is None else self.gid)


@dataclass
class BoundedFolder:
    """A folder at ``place`` that its owner alone may read and write. Blocking. Methods raise ``DiskFailedError``.

    As an image it is an ext4 file system in a sparse file beside it, whose blocks go back to the disk when what they hold is deleted.
    ``is_kept``: it is to outlive a power cut, and has a journal.
    """

    place: Path
    size: int
    bound: Bound
    is_kept: bool
    owner: Owner = Owner()
    _used: int | None = field(default=None, init=False)

    @property
    def image(self) -> Path:
        """The file that holds it."""
        return self.place.with_name(f"{self.place.name}.img")

    def open(self) -> None:
        """Make it, or find it as it was left, by whatever end of an agent or a machine."""
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
        """Let it be seen no more. Who has files open there keeps them."""
        if self.bound == "image":
            with disk_errors(self.place):
                note = unbind(self.place)
            if note:
                logger.warning("%s", note)

    def look(self) -> int | None:
        """Bytes that it holds now; None: more than can be counted. Of a folder that is watched, all files have to be looked at."""
        with disk_errors(self.place):
            if self.bound == "image":
                found = os.statvfs(self.place)
                self._used = (found.f_blocks - found.f_bfree) * found.f_frsize
            else:
                self._used = _bytes_below(self.place)
        return self._used

    @property
    def used(self) -> int | None:
        """What the last look found."""
        return self._used

    @property
    def is_exceeded(self) -> bool:
        """Whether the last look found more than there may be."""
        return self._used is None or self._used > self.size

    def occupied(self) -> int:
        """Bytes of the disk that it has taken."""
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
        for device in _run("losetup", "--noheadings", "--output", "NAME", "--associated", str(self.image)).split():
            _run("losetup", "--detach", device)  # of a mount that was killed half-way
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(self.image)).strip()
        try:
            _run("mount", "-t", "ext4", "-o", _OPTIONS, device, str(self.place))
        finally:
            _run("losetup", "--detach", device)  # from now on it lasts as long as the mount
        with suppress(OSError):
            (self.place / "lost+found").rmdir()
        self.owner.take_over(self.place)


def can_make_images(folder: Path) -> bool:
    """Try it below this folder: rights, devices and filters make every other way of asking unreliable."""
    if os.geteuid() != 0 or not all(shutil.which(program, path=_SYSTEM_PATH) for program in _PROGRAMS):
        return False
    probe = BoundedFolder(folder / ".probe", LEAST_BYTES, "image", is_kept=False)
    try:
        probe.open()
    except DiskFailedError as error:
        logger.info("job volumes are watched, because no image can be mounted: %s", error)
        return False
    finally:
        with suppress(OSError, DiskFailedError):
            probe.close()
            probe.image.unlink(missing_ok=True)
            probe.image.with_suffix(".new").unlink(missing_ok=True)
            probe.place.rmdir()
    return True


def _run(program: str, *arguments: str) -> str:
    """What it prints. Raises ``OSError`` with what it complains of."""
    found = shutil.which(program, path=_SYSTEM_PATH)
    if found is None:
        raise OSError(f"{program} is not installed")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)  # noqa: S603 - no shell, and no word of a job's
    if done.returncode:
        raise OSError(f"{program}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return done.stdout


def _bytes_below(root: Path) -> int | None:
    """Bytes of the disk that files and folders take, each once. No link is followed. What goes meanwhile may count or not."""
    counted: set[tuple[int, int]] = set()
    total = 0
    with ExitStack() as stack:
        try:
            top = stack.enter_context(opened(root, os.O_RDONLY | os.O_DIRECTORY))
        except PermissionError:  # who may write there may close it, too
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


def _below(folder: int, depth: int) -> Iterator[os.stat_result | None]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:  # a folder that may be listed and not searched
                yield None
                return
            yield found
            if stat.S_ISDIR(found.st_mode):
                yield from _inside(folder, entry.name, depth + 1)


def _inside(folder: int, name: str, depth: int) -> Iterator[os.stat_result | None]:
    """None: something of it cannot be counted."""
    with ExitStack() as stack:
        try:
            below = stack.enter_context(opened(name, _FOLDER, folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # it was swapped
        except OSError:
            yield None
            return
        if depth >= _DEEPEST:
            yield None
            return
        yield from _below(below, depth)
