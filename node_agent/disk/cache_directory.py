"""The cache directory of a running agent: locked by one agent, of a known format, and able to store files."""

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
from bdn.disk.threads import in_thread
from node_agent.disk.cache_format import check_format, keep_format
from node_agent.disk.group_sync import GroupSync
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names the time since the machine started. Raises ``DiskFailedError`` if a sandbox hides the file."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        reason = f"{error.strerror}; without it the agent cannot know which jobs ended with a restart: mount proc(5) in the sandbox"
        raise DiskFailedError(str(_BOOT_ID), reason) from error


@contextmanager
def owned(path: Path) -> Iterator[bool]:
    """Hold the directory's ``owner`` file locked; the kernel releases the lock however this process ends.

    Yields whether the machine has rebooted, as far as known, since the last owner began: then no earlier job runs, and
    unsynced data may be lost.

    Raises:
        InUseError: another agent holds the lock; names its process.
        DiskFailedError: the lock file is absent and cannot be made, or the file system does not support locks.
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
    """A read-only descriptor is enough for a lock: a disk that has become read-only can still be served."""
    with disk_errors(path):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _record(descriptor: int) -> None:
    """For operators, best effort: on a full or read-only disk the last owner's record stays; the lock holds anyway."""
    content = json.dumps({"pid": os.getpid(), "boot_id": boot_id()}).encode()
    with suppress(OSError):  # overwriting needs no new block
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def _recorded(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class UnnamedBytes:
    """Counts bytes of small files being written under dot names, before they are whole. Thread-safe.

    Parts in ``filling`` are not counted here: a scan of that folder counts them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.size = 0

    def add(self, size: int) -> None:
        """``size`` is negative once the files are gone or whole."""
        with self._lock:
            self.size += size


@dataclass(frozen=True)
class CacheDirectory:
    """``is_rebooted``: the machine has rebooted since an agent last held the directory."""

    places: Places
    files: WholeFiles
    writes: DirectWrites
    sync: GroupSync
    unnamed: UnnamedBytes
    is_rebooted: bool


async def open_cache_directory(stack: AsyncExitStack, places: Places) -> CacheDirectory:
    """Lock and prepare the directory until the stack ends.

    Raises:
        InvalidRequestError: the directory has an unknown format.
        InUseError: another agent holds it.
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
