"""Unpacks a job's archive for its commands. The archive comes from the job's author, so no name in it is trusted."""

import errno
import lzma
import os
import shutil
import stat
import tarfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from bdn.core.errors import CanceledError, InvalidRequestError, ScratchFullError
from bdn.disk.durable import disk_errors

_PIECE: Final = 1024**2
_MOST_HEADER: Final = 1024**2  # tarfile reads a header whole
_MOST_GLOBALS: Final = 64  # fields that hold for all later entries, each of a header's size at most
_HEADERS: Final = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_ENTRY_BYTES: Final = 4096  # counted for each entry, since an empty file or folder also takes space


class _Entry(tarfile.TarInfo):
    """Refuses, before it is read, what tarfile would read into memory at any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _HEADERS and entry.size > _MOST_HEADER:
            raise _refused(entry, f"is a header of {entry.size} bytes")
        if entry.type == tarfile.GNUTYPE_SPARSE:
            raise _refused(entry, "is a sparse file")  # whose map has no bound
        return entry

    def _proc_gnusparse_10(self, *_: object) -> None:  # of tarfile: reads the map of a sparse file in pax format
        raise _refused(self, "is a sparse file")


def archive_in(mount: Path) -> Path:
    """The only file of a staged archive. Blocking."""
    return next(path for path in sorted(mount.rglob("*")) if path.is_file())


def unpack(archive: Path, folder: Path, most_bytes: int, stop: threading.Event) -> None:
    """Unpack a tar of any compression into an empty folder that no other process writes. Blocking.

    Raises:
        InvalidRequestError: not a tar, or an entry leads out of the folder, is a device or sparse, or has a set-id bit.
        ScratchFullError: it needs more than ``most_bytes``, or the folder's file system is full.
        CanceledError: ``stop`` was set.
        DiskFailedError: it cannot be read or written.
    """
    used, links = 0, list[tuple[str, str]]()
    try:
        with disk_errors(folder), tarfile.open(archive, "r|*", tarinfo=_Entry) as tar:
            for entry in tar:
                tar.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps every entry
                if len(tar.pax_headers) > _MOST_GLOBALS:
                    raise _refused(entry, "has too many global headers")
                used += _ENTRY_BYTES + (entry.size if entry.isreg() else 0)
                if used > most_bytes:
                    raise ScratchFullError(str(folder), used, most_bytes)
                if stop.is_set():
                    raise CanceledError("unpacking the archive")
                links += [(entry.name, entry.linkname)] if entry.issym() else []
                try:
                    _unpack_entry(tar, entry, folder)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise ScratchFullError(str(folder), used, most_bytes) from error
                    raise
            for (
                name,
                target,
            ) in links:  # at the end, since none is followed before and a later link may lead an earlier one out
                _check_link(name, target, folder)
    except (tarfile.TarError, RecursionError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InvalidRequestError(f"the job's archive is not a tar that can be read: {error}") from error


def _unpack_entry(tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path) -> None:
    place = _inside(folder, entry, entry.name)
    if place == folder:
        return
    if entry.mode & (stat.S_ISUID | stat.S_ISGID):
        raise _refused(entry, "has a set-user-id or set-group-id bit")
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        raise _refused(entry, "is not a file, folder or link")
    _make_parents(folder, place, entry)
    mode = stat.S_IMODE(entry.mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR
    if entry.isdir():
        if not place.is_dir() or place.is_symlink():
            place.unlink(missing_ok=True)
            place.mkdir()
        place.chmod(mode | stat.S_IXUSR)
        return
    if place.is_dir() and not place.is_symlink():
        raise _refused(entry, "replaces a folder")
    place.unlink(missing_ok=True)  # a later entry of the same name replaces the earlier one
    if entry.issym():
        place.symlink_to(entry.linkname)
    elif entry.islnk():
        target = _inside(folder, entry, entry.linkname)
        if not target.is_file() or target.is_symlink() or target.resolve() != target:
            raise _refused(entry, f"links to {entry.linkname!r}, which is not an earlier file of the archive")
        place.hardlink_to(target)
    else:
        content = tar.extractfile(entry)
        assert content is not None  # noqa: S101 - the entry is a file
        with content, place.open("xb") as file:
            shutil.copyfileobj(content, file, _PIECE)
        place.chmod(mode)
        with suppress(OverflowError):
            os.utime(place, (entry.mtime, entry.mtime))


def _inside(folder: Path, entry: tarfile.TarInfo, name: str) -> Path:
    """The place of a name in the archive. ``folder`` is resolved."""
    path = os.path.normpath(name)
    if name.startswith("/") or "\0" in name or path == ".." or path.startswith("../"):
        raise _refused(entry, "leads out of the workspace")
    return folder / path


def _make_parents(folder: Path, place: Path, entry: tarfile.TarInfo) -> None:
    for parent in reversed(place.relative_to(folder).parents[:-1]):
        above = folder / parent
        if above.is_symlink() or (above.exists() and not above.is_dir()):
            raise _refused(entry, "leads through a link or a file")
        above.mkdir(exist_ok=True)


def _check_link(name: str, target: str, folder: Path) -> None:
    entry = tarfile.TarInfo(name)
    place = _inside(folder, entry, name)
    found = Path(os.path.realpath(place.parent / target))
    if target.startswith("/") or not found.is_relative_to(folder):
        raise _refused(entry, f"links to {target!r}, out of the workspace")


def _refused(entry: tarfile.TarInfo, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the job's archive is refused: {entry.name!r} {problem}")
