"""Read-only bind mounts: made before they are visible, and removed also while they are in use."""

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import socketpair
from typing import Final

from bdn.disk.syscalls import (
    MNT_DETACH,
    MS_BIND,
    MS_MOVE,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REMOUNT,
    attach_read_only,
    mount,
    unmount,
)

_READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
_WANTED = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV
_NO_OWNER: Final = "4294967294 4294967294 1"  # inside, outside, count: the last id, which no account has
# In a process of its own: a process with threads cannot make a user namespace. CLONE_NEWUSER is 0x10000000.
_IN_NEW_USER_NAMESPACE: Final = (
    "import ctypes, sys; ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and sys.exit(ctypes.get_errno()); "
    "print(flush=True); sys.stdin.read()"
)


def bind_read_only(view: Path, place: Path) -> None:
    """Mount ``view`` read-only at ``place``, after unmounting earlier mounts there.

    A mount propagates to the mount namespaces of jobs with the flags that it has when it is attached, so it must be
    read-only before that.
    """
    if is_bound(view, place):
        return
    unbind(place)
    try:
        attach_read_only(view, place)
    except OSError as error:
        # Linux before 5.12 lacks these calls; seccomp filters that do not know them return ENOSYS or EPERM.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        _bind_aside(view, place)


def bind_unwritable(view: Path, place: Path) -> None:
    """The same, and also where a copy of the mount becomes writable, not even root writes through it.

    runc since 1.2 clears the flag of a read-only mount that a container gets as ``rw``. Here no file has an owner, and
    Linux lets no user write to such files (``inode_permission``).

    Raises ``OSError``: this kernel, container or file system cannot do that.
    """
    if not is_bound(view, place):
        unbind(place)
        with _user_namespace_of_no_owner() as owners:
            attach_read_only(view, place, owners)


@contextmanager
def _user_namespace_of_no_owner() -> Iterator[int]:
    ours, its = socketpair()
    with its:
        command = (sys.executable, "-ISc", _IN_NEW_USER_NAMESPACE)
        child = subprocess.Popen(command, stdin=its.fileno(), stdout=its.fileno())  # noqa: S603 - constants
    with child, ours:
        if not ours.recv(1):
            raise OSError(child.wait(), "no user namespace can be made")
        process = Path("/proc", str(child.pid))
        for ids in ("uid_map", "gid_map"):
            (process / ids).write_text(_NO_OWNER)
        owners = os.open(process / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield owners
    finally:
        os.close(owners)


def is_bound(view: Path, place: Path) -> bool:
    """Whether ``place`` shows ``view``, read-only. Raises ``OSError``: one of them is absent, or its mount failed."""
    return view.samefile(place) and os.statvfs(place).f_flag & _WANTED == _WANTED


def _bind_aside(view: Path, place: Path) -> None:
    """Bind, remount, move. The bind is writable until the remount; its private mount does not propagate it."""
    with tempfile.TemporaryDirectory(prefix=".binding-", dir=place.parent) as aside, ExitStack() as stack:
        private, bound = Path(aside), Path(aside, "view")
        bound.mkdir()
        mount(private, private, MS_BIND)
        stack.callback(unbind, private)
        mount(None, private, MS_PRIVATE)
        mount(view, bound, MS_BIND)
        stack.callback(unbind, bound)
        mount(None, bound, MS_PRIVATE)
        mount(None, bound, _READ_ONLY)
        mount(bound, place, MS_MOVE)


def unbind(place: Path) -> str | None:
    """Unmount everything at ``place``, if anything. Returns a note for operators if a mount was only detached.

    A mount in use is detached: the path no longer shows it, and processes with open files there keep using it.
    """
    note = None
    while True:
        try:
            unmount(place)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return note
            if error.errno == errno.EPERM and not is_mount_point(place):
                return note  # no right to unmount, and nothing to unmount
            if error.errno != errno.EBUSY:
                raise
            unmount(place, MNT_DETACH)
            note = f"{place} was in use and is only detached: its space is free when the last open file is closed"


def is_mount_point(place: Path) -> bool:
    return place in _mount_points()


def mounts_below(folder: Path) -> list[Path]:
    found = [path for path in _mount_points() if folder in path.parents]
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def _mount_points() -> Iterator[Path]:
    """proc(5) escapes names in octal."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        name = line.split(b" ")[4]
        for character in b" \t\n\\":
            name = name.replace(b"\\%03o" % character, bytes([character]))
        yield Path(os.fsdecode(name))


def can_bind(folder: Path) -> bool:
    """Mount a probe: privileges, user namespaces and seccomp filters make any other check unreliable."""
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=folder) as probe:
        view, place = Path(probe, "view"), Path(probe, "place")
        view.mkdir()
        place.mkdir()
        try:
            bind_read_only(view, place)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                unbind(place)
    return True
