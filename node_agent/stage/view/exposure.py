"""How a stage's view appears at the path that its job gets: a bind mount, a symbolic link, or the view itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from bdn.core.errors import MountFailedError
from bdn.disk.binding import bind_read_only, can_bind, unbind
from bdn.disk.durable import disk_errors, make_folder, remove_empty
from bdn.wire.stage_schema import ExposureKind
from node_agent.disk.places import Places


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
