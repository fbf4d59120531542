"""The cache directory of a running agent: locked by one agent, of a format that this version knows, and able to take files."""

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import DiskFailedError, InUseError
from bdn.disk.direct import DirectWrites
from bdn.disk.durable import disk_errors, try_lock
from node_agent.background_tasks import in_thread
from node_agent.disk.cache_format import check_format, keep_format
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The kernel's name for the time since this machine started. Raises ``DiskFailedError``: a sandbox hides it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        reason = f"{error.strerror}; without it the agent cannot know which jobs ended with a restart: mount proc(5) in the sandbox"
        raise DiskFailedError(str(_BOOT_ID), reason) from error


@contextmanager
def owned(path: Path) -> Iterator[bool]:
    """Hold the directory's ``owner`` file locked; the kernel lets go of it however this process ends.

    Yields whether the machine was started anew since the last owner began, as far as anybody knows: then no job of before
    runs, and what was not synced may be gone.

    Raises:
        InUseError: another agent holds it; names its process.
        DiskFailedError: the lock file is absent and cannot be made; or the file system cannot lock files.
    """
    descriptor = _open(path)
    try:
        if not try_lock(descriptor, path.parent):
            pid = _recorded(descriptor).get("pid")
            owner = "another process" if pid is None else f"process {pid}"
            raise InUseError(f"cache directory {path.parent}", (owner,))
        is_rebooted = _recorded(descriptor).get("boot_id") != boot_id()
        _record(descriptor)
        yield is_rebooted
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """A lock needs no right to write: what a disk holds that has become read-only can still be served."""
    with disk_errors(path):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _record(descriptor: int) -> None:
    """Who it is, for people: on a disk that is full or read-only the last owner stays there, and the lock is ours all the same."""
    content = json.dumps({"pid": os.getpid(), "boot_id": boot_id()}).encode()
    with suppress(OSError):  # written over what is there: that needs no block that is not the file's already
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def _recorded(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class UnnamedBytes:
    """A count, in bytes, of small files that are being written beside whole ones. Shared by threads.

    Files in progress with a part in ``filling`` are not counted here: those can be seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.size = 0

    def add(self, size: int) -> None:
        """They are about to be written; negative when they are gone, or have become whole files."""
        with self._lock:
            self.size += size


@dataclass(frozen=True)
class CacheDirectory:
    """``is_rebooted`` when the machine was started anew since an agent had it last."""

    places: Places
    files: WholeFiles
    writes: DirectWrites
    sync: GroupSync
    unnamed: UnnamedBytes
    is_rebooted: bool


async def open_cache_directory(stack: AsyncExitStack, places: Places) -> CacheDirectory:
    """Take it until the stack ends.

    Raises:
        InvalidRequestError: it is of a format that this version does not know.
        InUseError: another agent has it.
        DiskFailedError: it cannot be used.
    """
    await in_thread(check_format, places)
    with disk_errors(places.root):
        await in_thread(places.make)
    is_rebooted = stack.enter_context(owned(places.owner))
    await in_thread(keep_format, places)
    writes = DirectWrites()
    await in_thread(writes.probe, places.filling)
    sync = stack.enter_context(GroupSync(places.root))
    return CacheDirectory(places, WholeFiles(places), writes, sync, UnnamedBytes(), is_rebooted)
