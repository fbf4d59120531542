"""How a stage's view appears at the path that its job gets: a bind mount, a symbolic link, or the view itself."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from bdn.core.errors import MountFailedError
from bdn.disk.durable import disk_errors, make_folder, remove_empty
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
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places

_READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
_WANTED = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV


def bind_read_only(view: Path, place: Path) -> None:
    """Mount ``view`` read-only at ``place``, after unmounting earlier mounts there.

    A mount propagates to the mount namespaces of jobs with the flags that it has when it is attached, so it must be
    read-only before that.
    """
    if view.samefile(place) and os.statvfs(place).f_flag & _WANTED == _WANTED:
        return
    unbind(place)
    try:
        attach_read_only(view, place)
    except OSError as error:
        # Linux before 5.12 lacks these calls; seccomp filters that do not know them return ENOSYS or EPERM.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        _bind_aside(view, place)


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


def expose(kind: ExposureKind, view: Path, place: Path) -> None:
    """Make the view visible at ``place``. Blocking. Idempotent, also after a crash in the middle.

    ``bind`` is a read-only mount, here and in every mount namespace to which it propagates: not even root can write
    through it without the right to mount (``CAP_SYS_ADMIN``). ``symlink`` needs no rights, and protects only as the
    files' modes do: root and the agent's user can edit a cached file through it, which is detected before the file's
    next use (``disk/whole_files.py``). ``none`` only checks that the view itself is at ``place``.

    Raises ``MountFailedError``: nothing is exposed.
    """
    with _mount_errors(place):
        if kind == "bind":
            make_folder(place, 0o755)
            bind_read_only(view, place)
        elif kind == "symlink":
            make_folder(place.parent, 0o755)
            aside = place.with_name(f".{place.name[:200]}.new")
            aside.unlink(missing_ok=True)
            aside.symlink_to(view)
            aside.replace(place)  # one step, also over another link
        elif not (view.is_dir() and view.samefile(place)):
            raise MountFailedError(str(place), "the view is not at this path")


def conceal(place: Path, mounts: Path) -> str | None:
    """Remove the mount or link at ``place``, and emptied folders below ``mounts``. The view stays. Idempotent.

    Looks at ``place`` for the kind of exposure, because settings may have changed. Returns a note as ``unbind``.

    Raises ``MountFailedError``, ``DiskFailedError``: the view is still exposed.
    """
    with disk_errors(place):
        is_link = place.is_symlink()
    note = None
    with _mount_errors(place):
        if is_link:
            place.unlink(missing_ok=True)
        else:
            note = unbind(place)
    remove_empty(place.parent if is_link else place, mounts)
    return note


@contextmanager
def _mount_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MountFailedError(str(place), error.strerror or str(error)) from error


def choose(wanted: ExposureKind | Literal["auto"], places: Places) -> ExposureKind:
    """``auto`` is bind where the kernel permits it, otherwise symlink."""
    if wanted != "auto":
        return wanted
    try:
        return "bind" if can_bind(places.mounts) else "symlink"
    except OSError:  # the probe needs a writable disk: this one is full or read-only
        return "symlink"
