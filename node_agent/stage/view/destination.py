"""A view at a directory of the user's choice: what ``bdn pull SOURCE DEST`` leaves behind."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import DiskFailedError, InvalidRequestError
from bdn.disk.durable import remove_tree, sync_folder, sync_folders
from node_agent.disk.places import Places
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view.build import Built, ViewBuilder, appear, compare_view, remove_view

_HINTS: Final = {
    errno.EBUSY: "it is a mount point; name a directory below it",
    errno.ENOTEMPTY: "it is not empty",
    errno.EEXIST: "it is not empty",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.ENAMETOOLONG: "a name in it is too long",
    errno.ELOOP: "its links lead in a circle",
}


@dataclass(frozen=True)
class Earlier:
    """What we published here before: the directory's inode, and the manifest, which may not be held any more.

    ``stamp`` is the time of its files, in nanoseconds since the epoch.
    """

    inode: int
    digest: Digest
    manifest: Manifest | None
    stamp: int


@dataclass(frozen=True)
class Destination:
    """One directory outside the cache. Blocking. The user's own files there are never touched.

    With ``links`` its files are those of the cache, where that is possible; all others get the time ``stamp``, in nanoseconds
    since the epoch.
    """

    path: Path
    stage_id: str
    files: WholeFiles
    stamp: int
    links: bool = False

    @property
    def places(self) -> Places:
        """The cache's."""
        return self.files.places

    @property
    def aside(self) -> Path:
        """Where the view is built, on the same file system."""
        return self.path.parent / f".{self.path.name[:150]}.bdn-{self.stage_id}"

    def inode(self) -> int | None:
        """The directory that stands here now, or None."""
        try:
            return self.path.stat().st_ino if self.path.is_dir() else None
        except OSError:
            return None

    def check(self, earlier: Earlier | None, *, is_last: bool = False) -> None:
        """Refuse, best before anything is fetched, a destination where the view could not be published.

        An earlier view whose manifest is not known any more is let pass until the last look; it may be the one that comes.

        Raises ``InvalidRequestError``: names the directory and says why.
        """
        # The cases: below our own cache; below a file; absent; a file; where the caller stands, which would vanish under
        # its feet; empty; ours and holding nothing but ours; anything else is the user's.
        with _errors_at(self.path):
            if self.path == self.places.root or self.places.root in self.path.parents:
                self._refuse("it lies in the cache directory")
            if any(folder.exists() and not folder.is_dir() for folder in self.path.parents):
                self._refuse("a part of the path is a file")
            if not self.path.exists():
                return
            if not self.path.is_dir():
                self._refuse("it is a file")
            if self.path == Path.cwd() or self.path in Path.cwd().parents:
                self._refuse("it is, or holds, the current directory; name a directory below it")
            if any(self.path.iterdir()):
                self._check_ours(earlier, is_last=is_last)

    def _check_ours(self, earlier: Earlier | None, *, is_last: bool) -> None:
        if earlier is None or self.inode() != earlier.inode:
            self._refuse("it is not empty; name a new directory")
        if earlier.manifest is None:
            if is_last:
                self._refuse("what an earlier pull put there is not known any more; move it away first")
            return
        foreign = compare_view(earlier.manifest, self.path, self.files, earlier.stamp).foreign
        if foreign is not None:
            self._refuse(f"it holds {foreign!r}, which did not come from bdn or was changed since; move it away first")

    def is_intact(self, earlier: Earlier) -> bool:
        """Whether the directory is still exactly what we published."""
        if earlier.manifest is None or self.inode() != earlier.inode:
            return False
        try:
            return compare_view(earlier.manifest, self.path, self.files, earlier.stamp).is_intact
        except OSError:
            return False

    def build(self, manifest: Manifest, earlier: Earlier | None, stop: threading.Event) -> ViewBuilder:
        """Build the view beside the destination, but for its gifts. What is there after a failure is for ``clear``."""
        self.check(_known(earlier, manifest), is_last=True)
        with _errors_at(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.clear()
            builder = ViewBuilder(self.aside, self.files, stop, links=self.links, stamp=self.stamp)
            builder.build(manifest)
        return builder

    def publish(self, builder: ViewBuilder, manifest: Manifest, earlier: Earlier | None) -> tuple[Built, int]:
        """Finish what was built, and let it appear; an earlier view of ours goes.

        Returns how it was made, and its inode. A failure leaves the destination as it was.
        """
        earlier = _known(earlier, manifest)
        with _errors_at(self.path):
            built = builder.finish()
            sync_folders(self.aside)
            inode = self.aside.stat().st_ino
            self.check(earlier, is_last=True)  # building took a while
            appear(self.aside, self.path, replaces=earlier is not None)
            sync_folder(self.path.parent)
            remove_view(self.aside, earlier.manifest if earlier else None, self.files)
        return built, inode

    def clear(self) -> None:
        """Remove what was being built here."""
        with _errors_at(self.path):
            remove_tree(self.aside)

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidRequestError(f"cannot put files at {self.path}: {problem}")


def _known(earlier: Earlier | None, manifest: Manifest) -> Earlier | None:
    """The one that comes is known again."""
    return replace(earlier, manifest=manifest) if earlier and earlier.digest == manifest.digest else earlier


def resolved(destination: Path) -> Path:
    """Where the user means, links followed. Blocking."""
    with _errors_at(destination):
        try:
            return destination.resolve()
        except RuntimeError as error:  # Python's word for ELOOP
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error


@contextmanager
def _errors_at(path: Path) -> Iterator[None]:
    """The user's choice of directory is to blame for some errors, the disk for the others."""
    try:
        yield
    except OSError as error:
        if hint := _HINTS.get(error.errno or 0):
            raise InvalidRequestError(f"cannot put files at {path}: {hint}") from error
        raise DiskFailedError(os.fsdecode(error.filename or path), error.strerror or str(error)) from error
