"""Read-only bind mounts: made before they are visible, and removed also while they are in use."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

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
