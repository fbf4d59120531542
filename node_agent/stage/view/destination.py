"""A view at a directory of the user's choice, for ``bdn pull SOURCE DEST``."""

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final, NoReturn

from bdn.core.chunk import Digest
from bdn.core.errors import DiskFailedError, InvalidRequestError
from bdn.core.layout import Manifest
from bdn.disk.binding import is_mount_point
from bdn.disk.durable import remove_tree, sync_folder, sync_folders
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view import in_place
from node_agent.stage.view.build import (
    Built,
    appear,
    build_view,
    can_clone,
    compare_view,
    is_ours,
    remove_view,
    replaced,
)

_NO_ENTRY: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_HINTS: Final = {
    errno.EBUSY: "something is mounted there; name a directory below it",
    errno.EROFS: "its file system is read-only",
    errno.EAGAIN: "another pull is at work there; wait for it",
    errno.ENOTEMPTY: "it is not empty",
    errno.EEXIST: "it is not empty",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.ENAMETOOLONG: "a name in it is too long",
    errno.ELOOP: "its symbolic links form a loop",
}


@dataclass(frozen=True)
class Earlier:
    """The earlier pull at this directory: ``manifest`` is None if it is no longer cached.

    ``stamp`` is the time of its files, in nanoseconds since the epoch.
    """

    inode: int
    digest: Digest
    manifest: Manifest | None
    stamp: int


@dataclass(frozen=True)
class Destination:
    """One directory outside the cache. Blocking. Never touches the user's own files there.

    With ``links`` its files are hard links to the cache where possible; all other files get the time ``stamp``, in
    nanoseconds since the epoch.
    """

    path: Path
    stage_id: str
    files: WholeFiles
    stamp: int
    links: bool = False

    @property
    def places(self) -> Places:
        return self.files.places

    @cached_property
    def is_in_place(self) -> bool:
        """Whether files are moved in one by one: it is a mount point, or the agent may not write to its parent."""
        with errors_at(self.path):
            return self.path.is_dir() and (self._is_mount_point or not self._is_replaceable())

    @cached_property
    def _is_mount_point(self) -> bool:
        try:
            return is_mount_point(self.path)
        except OSError:  # no /proc
            return self.path.is_mount()

    def _is_replaceable(self) -> bool:
        parent, own = self.path.parent.stat(), self.path.stat()
        if parent.st_mode & stat.S_ISVTX and os.geteuid() not in (0, parent.st_uid, own.st_uid):
            return False  # rename(2): in a sticky directory only owners may
        try:
            _try_folder(self.path.parent)
        except OSError as error:
            if error.errno not in _NO_ENTRY:
                raise
            return False
        return True

    @property
    def aside(self) -> Path:
        """Where the view is built, on the destination's file system."""
        if self.is_in_place:
            return in_place.hidden_folder(self.path, self.stage_id) / "tree"
        return self._beside

    @property
    def _beside(self) -> Path:
        name = os.fsencode(self.path.name)[:150].decode(errors="ignore")
        return self.path.parent / f".{name}.bdn-{self.stage_id}"

    def nearest(self) -> Path:
        """The folder in which the view will be built, or the first of its parents that exists."""
        return nearest_folder(self.path if self.is_in_place else self.path.parent)

    def makes_copies(self) -> bool:
        """Whether the view's files will need blocks of their own. Tries to clone an empty file."""
        with errors_at(self.path):
            there, cache = self.nearest(), self.places.root
            is_one = there.stat().st_dev == cache.stat().st_dev
            return not (self.links and is_one and not self.is_in_place) and not can_clone(cache, there)

    def inode(self) -> int | None:
        try:
            return self.path.stat().st_ino if self.path.is_dir() else None
        except OSError:
            return None

    def check(self, earlier: Earlier | None, *, is_last: bool = False) -> None:
        """Reject a destination where the view could not be published, if possible before anything is fetched.

        Passes an earlier view whose manifest is unknown until ``is_last``, because the new manifest may be the same.

        Raises ``InvalidRequestError``: names the directory and the reason.
        """
        # The cases: below our own cache; below a file; absent; a file; the caller's current directory, which would
        # vanish; empty; only files that BDN put there; anything else is the user's.
        with errors_at(self.path):
            check_place(self.path, None if is_last else self.nearest, self.places)
            if not self.path.exists():
                return
            if self.path == Path.cwd() or self.path in Path.cwd().parents:
                self._refuse("it is, or holds, the current directory; name a directory below it")
            with os.scandir(os.fsencode(self.path)) as entries:
                is_empty = all(self._is_skipped(entry.name) for entry in entries)
            if not is_empty:
                self._check_ours(earlier, is_last=is_last)

    def _is_skipped(self, name: bytes) -> bool:
        """Whether the name is not content: a hidden folder of a pull, or ``lost+found``."""
        return name.startswith(in_place.HIDDEN.encode()) or (name == b"lost+found" and self._is_mount_point)

    def _check_ours(self, earlier: Earlier | None, *, is_last: bool) -> None:
        placed = in_place.unfinished(self.path)
        if known := self._placed(earlier):
            placed.append(known)
        elif earlier is not None and self.inode() == earlier.inode:
            if is_last:
                self._refuse("BDN no longer knows which files an earlier pull put there; move them away first")
            return
        if not placed:
            self._refuse("it is not empty; name a new directory")
        first, *others = placed
        also = [(one.manifest, one.stamp) for one in others]
        foreign = compare_view(
            first.manifest, self.path, self.files, first.stamp, also=also, is_skipped=self._is_skipped
        ).foreign
        if foreign is not None:
            self._refuse(f"it holds {foreign!r}, which did not come from bdn or was changed since; move it away first")

    def _placed(self, earlier: Earlier | None) -> in_place.Placed | None:
        if earlier is None or earlier.manifest is None or self.inode() != earlier.inode:
            return None
        return in_place.Placed(earlier.manifest, earlier.stamp)

    def is_intact(self, earlier: Earlier) -> bool:
        if earlier.manifest is None or self.inode() != earlier.inode:
            return False
        try:
            look = partial(compare_view, is_skipped=self._is_skipped)
            return look(earlier.manifest, self.path, self.files, earlier.stamp).is_intact
        except OSError:
            return False

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock a directory that is filled in place. Raises ``InvalidRequestError`` if another pull works there."""
        with errors_at(self.path):
            claim = in_place.claimed(self.path) if self.is_in_place else nullcontext()
            with claim:
                yield

    def build(self, manifest: Manifest, earlier: Earlier | None, stop: threading.Event) -> tuple[Built, int]:
        """Build the view aside, durably. Also returns the inode that the directory will have.

        After a failure, ``clear`` removes what is left.
        """
        self.check(_known(earlier, manifest), is_last=True)
        with errors_at(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.clear()
            self.aside.parent.mkdir(mode=0o700, exist_ok=True)
            links = self.links and not self.is_in_place
            built = build_view(manifest, self.aside, self.files, stop, links=links, stamp=self.stamp)
            sync_folders(self.aside)
            inode = (self.path if self.is_in_place else self.aside).stat().st_ino
            self.check(_known(earlier, manifest), is_last=True)  # building took a while
        return built, inode

    def publish(self, manifest: Manifest, earlier: Earlier | None) -> None:
        """Publish the finished view, and remove the earlier view.

        A failure leaves the destination unchanged. If it is filled in place, it may lack files of the earlier view;
        ``clear`` removes the new files.
        """
        earlier = _known(earlier, manifest)
        with errors_at(self.path):
            if self.is_in_place:
                placed = self._placed(earlier)
                in_place.move_in(self.path, self.aside, manifest, [placed] if placed else [])
                return
            appear(self.aside, self.path, replaces=earlier is not None)
            sync_folder(self.path.parent)
            remove_view(self.aside, earlier.manifest if earlier else None, self.files)

    def settle(self) -> None:
        """Call when the publication is recorded: ``clear`` then leaves its files."""
        with errors_at(self.path):
            if self.is_in_place:
                in_place.finish(self.aside.parent)

    def clear(self) -> None:
        """Remove unfinished views, and the files that unfinished pulls moved here."""
        with errors_at(self.path):
            if not self.path.exists():  # killed between the two steps of a replacement
                with suppress(FileNotFoundError, NotADirectoryError):
                    replaced(self._beside).rename(self.path)
            remove_tree(replaced(self._beside))
            remove_tree(self._beside)
            in_place.undo(self.path, lambda entry, found, at, stamp: is_ours(entry, found, self.files, at, stamp))

    def _refuse(self, problem: str) -> NoReturn:
        _refuse(self.path, problem)


def _known(earlier: Earlier | None, manifest: Manifest) -> Earlier | None:
    """Fill in the earlier manifest if the new manifest is the same."""
    return replace(earlier, manifest=manifest) if earlier and earlier.digest == manifest.digest else earlier


def _refuse(path: Path, problem: str) -> NoReturn:
    raise InvalidRequestError(f"cannot put files at {path}: {problem}")


def nearest_folder(place: Path) -> Path:
    """The folder, or the first of its parents that exists."""
    return next(folder for folder in (place, *place.parents) if folder.exists())


def check_place(path: Path, nearest: Callable[[], Path] | None, places: Places) -> None:
    """Reject a path in the cache, below a file, or of a file.

    With ``nearest``, creates and removes a folder where the view will be built, and looks up each missing name.
    """
    if path == places.root or places.root in path.parents:
        _refuse(path, "it is in the cache directory")
    if any(folder.exists() and not folder.is_dir() for folder in path.parents):
        _refuse(path, "a part of the path is a file")
    if path.exists() and not path.is_dir():
        _refuse(path, "it is a file" if path.is_file() else "it is not a directory")
    if nearest is not None:
        there = nearest()
        _try_folder(there)
        for name in path.relative_to(there).parts:
            with suppress(FileNotFoundError):  # OSError: the file system does not support the name
                (there / name).lstat()


def _try_folder(place: Path) -> None:
    """Raises ``OSError`` if no folder can be created there."""
    try:
        made = tempfile.mkdtemp(prefix=f"{in_place.HIDDEN}try-", dir=place)
    except FileNotFoundError as error:  # e.g. proc(5)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(place)) from error
    with suppress(OSError):
        Path(made).rmdir()


def resolved(destination: Path) -> Path:
    with errors_at(destination):
        try:
            return destination.resolve()
        except RuntimeError as error:  # Python raises it for ELOOP
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error


@contextmanager
def errors_at(path: Path) -> Iterator[None]:
    """Raises ``InvalidRequestError`` if the user should choose another directory, otherwise ``DiskFailedError``."""
    try:
        yield
    except OSError as error:
        if hint := _HINTS.get(error.errno or 0):
            raise InvalidRequestError(f"cannot put files at {path}: {hint}") from error
        name, reason = os.fsdecode(error.filename or path), error.strerror or str(error)
        raise DiskFailedError(name, reason, is_full=error.errno in (errno.ENOSPC, errno.EDQUOT)) from error
