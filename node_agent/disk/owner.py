"""One agent per cache directory."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bdn.core.errors import InUseError
from node_agent.disk.durable import disk_errors


def boot_id() -> str:
    """The kernel's name for the time since this machine started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Hold the directory's ``owner`` file locked; the kernel lets go of it however this process ends.

    Raises:
        InUseError: another agent holds it; names its process.
        DiskFailedError: the directory cannot be written.
    """
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"cache directory {path.parent}", (_owner(descriptor),)) from None
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "boot_id": boot_id()}).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _owner(descriptor: int) -> str:
    try:
        return f"process {json.loads(os.pread(descriptor, 4096, 0))['pid']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
