"""Read-only bind mounts: made, recognised and taken away, also when an earlier process stopped half-way."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from bdn.disk.syscalls import (
    MNT_DETACH,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    MS_REMOUNT,
    mount,
    unmount,
)

_READ_ONLY = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV


def bind_read_only(view: Path, place: Path) -> None:
    """Let ``place`` show ``view``, read-only. Whatever an earlier mount left there is taken away first.

    Two calls are needed (mount(2): flags other than MS_REC are ignored on MS_BIND), so for a moment the mount is writable;
    nobody was told of the path by then.
    """
    if view.samefile(place) and os.statvfs(place).f_flag & os.ST_RDONLY:
        return
    unbind(place)
    mount(view, place, MS_BIND)
    try:
        mount(None, place, _READ_ONLY)
    except OSError:
        with suppress(OSError):
            unmount(place, MNT_DETACH)
        raise


def unbind(place: Path) -> str | None:
    """Unmount everything at ``place``; nothing there, or no such place, is fine.

    A mount in use is detached: it is gone for everybody who comes, and stays for whoever has files open there.
    """
    note = None
    while True:
        try:
            unmount(place)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return note
            if error.errno == errno.EPERM and not is_mount_point(place):
                return note  # without the right to unmount, and nothing to unmount
            if error.errno != errno.EBUSY:
                raise
            unmount(place, MNT_DETACH)
            note = f"{place} was in use and is only detached: its space is free when the last open file is closed"


def is_mount_point(place: Path) -> bool:
    """Whether something is mounted exactly here (mount points' names are escaped in octal, proc(5))."""
    escaped = os.fsencode(place)
    for character in b"\\ \t\n":
        escaped = escaped.replace(bytes([character]), b"\\%03o" % character)
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return any(line.split(b" ")[4] == escaped for line in lines)


def mounts_below(folder: Path) -> list[Path]:
    """Mount points below a folder, the deepest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        raw = line.split(b" ")[4]
        for character in b" \t\n\\":
            raw = raw.replace(b"\\%03o" % character, bytes([character]))
        path = Path(os.fsdecode(raw))
        if folder in path.parents:
            found.append(path)
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def can_bind(folder: Path) -> bool:
    """Try it: privileges, user namespaces and seccomp filters make every other way of asking unreliable."""
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
