"""The lock of an embedded mirror's data directory. The file names the holder, and the URL where it answers.

The content is read only while the lock is held: a killed process releases the lock, but leaves the content. Only its
owner can open the file, so no other user can lock it, or write into it to redirect us to another service
(docs/adr/0044).
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bdn.core.errors import InUseError
from bdn.disk.durable import disk_errors, try_lock

_PRIVATE: Final = 0o600
_LONGEST: Final = 4096  # bytes


class DataDirectoryInUseError(InUseError):
    """Another process holds the lock.

    ``url`` is where it answers, and ``auth`` whether callers need a token. Without a URL, ``is_passing`` marks a holder
    that will answer soon, or end.
    """

    url: str = ""
    auth: str = "token"
    is_passing: bool = False


@dataclass(frozen=True)
class DataLock:
    descriptor: int
    program: str

    @contextmanager
    def answering(self, url: str, auth: str) -> Iterator[None]:
        """Until the block ends, other processes of this user may send requests there."""
        self.say(url=url, auth=auth)
        try:
            yield
        finally:
            self.say()

    def say(self, **facts: str) -> None:
        """Write the facts into the lock file. A full disk loses or cuts them off; the lock is held all the same."""
        content = json.dumps({"holder": f"{self.program} (process {os.getpid()})", **facts}).encode()
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, content, 0)


@contextmanager
def locked(data_dir: Path, program: str) -> Iterator[DataLock]:
    """Lock the data directory for one process; the kernel releases the lock when the process ends.

    Raises:
        DataDirectoryInUseError: another process holds it.
        DiskFailedError: the lock file is absent and cannot be created; or the file system cannot lock files.
    """
    with disk_errors(data_dir):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(data_dir / "mirror.lock", flags, _PRIVATE)
    try:
        if not try_lock(descriptor, data_dir):
            raise _in_use(data_dir, descriptor)
        with suppress(OSError):
            os.fchmod(descriptor, _PRIVATE)  # also for a file that another user or program created
        lock = DataLock(descriptor, program)
        lock.say()
        yield lock
    finally:
        os.close(descriptor)


def _in_use(data_dir: Path, descriptor: int) -> DataDirectoryInUseError:
    """What the lock file says of its holder, as far as it can be trusted."""
    found, said = os.fstat(descriptor), os.pread(descriptor, _LONGEST, 0)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & ~_PRIVATE & 0o777
    try:
        facts = json.loads(said)
        holder, url, auth = str(facts["holder"]), str(facts.get("url", "")), str(facts.get("auth", "token"))
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours, holder, url, auth = is_ours and not said, "another process", "", "token"  # not written yet
    what = f"the data directory {data_dir}"
    if not is_ours:
        return DataDirectoryInUseError(what, (holder,))
    return DataDirectoryInUseError(what, (holder,), url, auth, is_passing=not url)
