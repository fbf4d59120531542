"""Whether a rank's processes live, seen from another container of its pod, with which they share files and nothing else."""

import os
import select
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from bdn.core.errors import DiskFailedError
from bdn.disk.durable import disk_errors
from node_agent.run.directory import RunDirectory

Life = Literal["AWAITED", "ALIVE", "ENDED"]
_PIECE: Final = 64 * 1024


def make_alive(path: Path) -> None:
    """Make the FIFO that ``start.sh`` opens for writing before anything else. Idempotent. Blocking."""
    with disk_errors(path), suppress(FileExistsError):
        os.mkfifo(path, 0o600)


class Liveness:
    """The reading end of the FIFO. All processes of the rank inherit its writing end, and process 1 holds it to its end.

    The kernel closes it for processes that are killed. A context manager. Raises ``DiskFailedError``: the job replaced it.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._env = directory.env
        with disk_errors(directory.alive):
            self._pipe = os.open(directory.alive, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not stat.S_ISFIFO(os.fstat(self._pipe).st_mode):
            os.close(self._pipe)
            raise DiskFailedError(str(directory.alive), "it is not a FIFO any more: the job replaced it")
        self._poll = select.poll()
        self._poll.register(self._pipe, 0)  # reports a hang-up alone, and that only after a writer since our open
        self._has_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._pipe)

    def look(self) -> Life:
        """Does not block. AWAITED: no process of the rank has begun."""
        # ``start.sh`` removes it after it has opened the FIFO. Looked up first: it may begin before the next line.
        has_begun = not os.path.lexists(self._env)
        try:
            is_held = os.read(self._pipe, _PIECE) != b""  # of a job that writes into it
        except BlockingIOError:
            is_held = True
        self._has_begun |= is_held or has_begun or bool(self._poll.poll(0))
        return "ALIVE" if is_held else "ENDED" if self._has_begun else "AWAITED"
