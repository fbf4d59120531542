"""One agent per cache directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bdn.core.errors import InUseError
from bdn.disk.durable import disk_errors


def boot_id() -> str:
    """The kernel's name for the time since this machine started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextmanager
def owned(path: Path) -> Iterator[bool]:
    """Hold the directory's ``owner`` file locked; the kernel lets go of it however this process ends.

    Yields whether the machine was started anew since the last owner began, as far as anybody knows: then no job of before
    runs, and what was not synced may be gone.

    Raises:
        InUseError: another agent holds it; names its process.
        DiskFailedError: there is no such file, and none can be made.
    """
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"cache directory {path.parent}", (_owner(descriptor),)) from None
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


def _owner(descriptor: int) -> str:
    recorded = _recorded(descriptor)
    return f"process {recorded['pid']}" if "pid" in recorded else "another process"


def _recorded(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
