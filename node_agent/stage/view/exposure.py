"""How a stage's view appears at the path that its job is told: one small Protocol, three ways."""

import errno
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bdn.core.errors import MountFailedError
from bdn.disk.durable import make_folder, remove_empty
from bdn.disk.syscalls import MNT_DETACH, MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REMOUNT, mount, unmount
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places

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


class Exposure(Protocol):
    """One way to expose. Blocking; both calls can be repeated, also after a crash in the middle."""

    @property
    def kind(self) -> ExposureKind:
        """Its name on the wire."""
        ...

    def expose(self, view: Path, place: Path) -> None:
        """Make the view visible at ``place``. Raises ``MountFailedError``; then nothing is exposed."""
        ...

    def conceal(self, place: Path) -> str | None:
        """Take it away and remove the mount point; the view stays. Returns what people should know, if anything."""
        ...


@dataclass(frozen=True)
class BindExposure:
    """A read-only bind mount: not even root can write through it."""

    mounts: Path
    kind: ExposureKind = "bind"

    def expose(self, view: Path, place: Path) -> None:
        """Mount the view over an empty directory."""
        try:
            make_folder(place, 0o755)
            bind_read_only(view, place)
        except OSError as error:
            raise MountFailedError(str(place), error.strerror or str(error)) from error

    def conceal(self, place: Path) -> str | None:
        """Unmount; from a job that still has files open, the mount is only detached."""
        try:
            note = unbind(place)
        except OSError as error:
            raise MountFailedError(str(place), error.strerror or str(error)) from error
        remove_empty(place, self.mounts)
        return note


@dataclass(frozen=True)
class SymlinkExposure:
    """A symbolic link: needs no rights, and protects nothing but what the files' modes protect."""

    mounts: Path
    kind: ExposureKind = "symlink"

    def expose(self, view: Path, place: Path) -> None:
        """Link to the view, in one step also when another link stands there."""
        aside = place.with_name(f".{place.name[:200]}.new")
        try:
            make_folder(place.parent, 0o755)
            aside.unlink(missing_ok=True)
            aside.symlink_to(view)
            aside.replace(place)
        except OSError as error:
            raise MountFailedError(str(place), error.strerror or str(error)) from error

    def conceal(self, place: Path) -> str | None:
        """Remove the link."""
        try:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise MountFailedError(str(place), error.strerror or str(error)) from error
        remove_empty(place.parent, self.mounts)
        return None


@dataclass(frozen=True)
class NoExposure:
    """The view itself stands at the place, so there is nothing to do; it goes when the view goes."""

    mounts: Path
    kind: ExposureKind = "none"

    def expose(self, view: Path, place: Path) -> None:
        """Only check that it is so."""
        try:
            is_there = view.is_dir() and view.samefile(place)
        except OSError as error:
            raise MountFailedError(str(place), error.strerror or str(error)) from error
        if not is_there:
            raise MountFailedError(str(place), "the view does not stand there")

    def conceal(self, place: Path) -> str | None:
        """Nothing to take away."""
        remove_empty(place, self.mounts)
        return None


def exposures(places: Places) -> dict[ExposureKind, Exposure]:
    """Every way there is."""
    ways: tuple[Exposure, ...] = (
        BindExposure(places.mounts),
        SymlinkExposure(places.mounts),
        NoExposure(places.mounts),
    )
    return {way.kind: way for way in ways}


def choose(wanted: str, places: Places) -> ExposureKind:
    """The way for new stages; ``auto`` is bind where the kernel permits it, otherwise symlink."""
    if wanted == "auto":
        try:
            return "bind" if can_bind(places.mounts) else "symlink"
        except OSError:  # a disk on which nothing can be tried: full, or read-only
            return "symlink"
    return next(kind for kind in exposures(places) if kind == wanted)
