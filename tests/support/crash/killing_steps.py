"""A program that is killed at one of its steps: a call that changes the disk, or makes it durable, or a commit to a database.

``python -m tests.support.crash.killing_steps FILE MODULE ARGUMENT…`` runs ``MODULE.main``. In ``FILE``, which both sides map into memory, it
counts its steps, and finds before (or after) which one it is to die by SIGKILL: nothing is flushed, and no other thread ends its work.
"""

import ctypes
import functools
import importlib
import mmap
import os
import shutil  # asks at its import what ``os`` can do, and would not know ours
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

_FORM: Final = struct.Struct("<QQQ")  # steps so far, the step to die at (0: none), whether after it
_CALLS: Final = (
    *("write", "pwrite", "fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir"),
    *("symlink", "truncate", "ftruncate", "utime", "chmod", "fchmod"),
)
_LIBC: Final = ("fallocate", "syncfs", "renameat2")
_MOUNTING: Final = ("mount", "umount2", "syscall")  # of the CSI driver: opening, binding and unmounting


@dataclass(frozen=True)
class Fuse:
    """A test's side: how far a program is, and when it dies."""

    shared: mmap.mmap
    path: Path

    @classmethod
    def at(cls, path: Path) -> Self:
        path.write_bytes(_FORM.pack(0, 0, 0))
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _FORM.size), path)

    @property
    def steps(self) -> int:
        return int(_FORM.unpack_from(self.shared)[0])

    def light(self, steps: int, *, after: bool) -> None:
        """Let the program die so many steps from now; before the step, or right after it."""
        _FORM.pack_into(self.shared, 0, self.steps, self.steps + steps, after)

    def spare(self) -> None:
        """Whoever is started next lives until there is another light."""
        _FORM.pack_into(self.shared, 0, self.steps, 0, 0)

    def command(self, module: str, *arguments: str) -> tuple[str, ...]:
        """How the program is started."""
        return (sys.executable, "-m", "tests.support.crash.killing_steps", str(self.path), module, *arguments)


class _Counting:
    """The program's side. Steps of several threads are counted one after the other."""

    def __init__(self, shared: mmap.mmap) -> None:
        self._shared = shared
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Count one; whether we are to die once it is done."""
        with self._lock:
            steps, last, is_after = _FORM.unpack_from(self._shared)
            struct.pack_into("<Q", self._shared, 0, steps + 1)
        if last and steps + 1 >= last:
            if not is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return True
        return False

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def step(*arguments: Any, **named: Any) -> Any:
            is_last = self.begin()
            try:
                return call(*arguments, **named)
            finally:
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return step

    def opened(self, call: Callable[..., int]) -> Callable[..., int]:
        """Opening is a step when it may make a file."""
        stepping = self.counted(call)

        @functools.wraps(call)
        def step(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            return int((stepping if flags & os.O_CREAT else call)(path, flags, *arguments, **named))

        return step


class _Library:
    """The C library, some of whose functions are steps."""

    def __init__(self, library: ctypes.CDLL, counting: _Counting, names: tuple[str, ...]) -> None:
        self._library = library
        self._steps = {name: counting.counted(getattr(library, name)) for name in names}

    def __getattr__(self, name: str) -> Any:
        return self._steps.get(name) or getattr(self._library, name)


def dies_at(fuse: Fuse, action: Callable[[Callable[[], None]], None]) -> bool:
    """Whether ``action`` was killed, in a fork of this process. It is given what lights the fuse; the test sets it before, by ``step``.

    Raises ``AssertionError``: it failed by itself.
    """
    steps, last, is_after = _FORM.unpack_from(fuse.shared)
    fuse.spare()
    child = os.fork()
    if not child:
        code = 1
        try:
            _count_steps(_Counting(fuse.shared))
            action(lambda: fuse.light(last - steps, after=bool(is_after)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the action failed: its trace is above"
    return status == signal.SIGKILL


def _count_steps(counting: _Counting) -> None:
    for name in _CALLS:
        setattr(os, name, counting.counted(getattr(os, name)))
    os.open = counting.opened(os.open)
    assert shutil.rmtree.avoids_symlink_attacks


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    with Path(path).open("r+b") as file:
        counting = _Counting(mmap.mmap(file.fileno(), _FORM.size))
    sys.argv = [module, *arguments]
    target = importlib.import_module(module)
    _count_steps(counting)
    if module.startswith("node_agent"):
        syscalls = importlib.import_module("bdn.disk.syscalls")
        names = _LIBC + _MOUNTING if module.startswith("node_agent.csi") else _LIBC
        vars(syscalls)["_libc"] = _Library(syscalls._libc, counting, names)
    else:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        event.listen(Engine, "commit", counting.counted(lambda _: None))
    target.main()


if __name__ == "__main__":
    main()
