"""The folder of whole files, and what each looked like when its bytes were known to be right: its pin.

A hard link lets others reach the cache's own file: root can write into it, and so can its owner after a chmod. Writing
changes the modification time; setting that back changes the change time. A file that differs from its pin is not handed on
before it was read and found right (docs/adr/0032).
"""

# ruff: noqa: PTH104, PTH116 - these calls are made for each of a million files, and a Path costs as much as the call

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

from bdn.core.cache.digest_table import DigestTable
from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of, file_digest
from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, opened, write_at_once
from node_agent.disk.places import Places, name_in_files

_MAGIC: Final = b"bdnpins1"
_PIN_SIZE: Final = 16  # bytes: nanoseconds of modification and of change; zeros where there is no pin
_WORD: Final = (1 << 64) - 1
_NO_RENAME: Final = frozenset({errno.EXDEV, errno.EPERM})  # another mount of one file system, another project's quota


class Alike(NamedTuple):
    """What of a file is the same as of its copy: where it lies, and whose it is."""

    device: int
    owner: int
    group: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Of this file."""
        return cls(status.st_dev, status.st_uid, status.st_gid)


class ChangedFilesError(Exception):
    """Whole files are not as we left them: their bytes may be wrong. Whoever wants to hand them on has them read first."""

    def __init__(self, contents: Iterable[Digest]) -> None:
        super().__init__()
        self.contents = tuple(contents)


class WholeFiles:
    """Everything that changes or compares whole files' times goes through here. Blocking; shared by threads."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._root = f"{places.files}/"
        self._lock = threading.Lock()  # held while a file's times change, and until its pin says so
        self._pins = DigestTable(width=_PIN_SIZE)
        self._saving = threading.Lock()  # stages of one manifest write one file

    # --- what we do with files; methods raise ``OSError`` ---

    def appear(self, content: Digest, aside: str | os.PathLike[str]) -> None:
        """Let a verified file stand under its name, pinned as it is."""
        path = self._path(content)
        with self._lock:
            os.rename(aside, path)
            self._pins[content] = seen(os.stat(path))

    def link(self, content: Digest, name: bytes | str, folder: int | None = None) -> None:
        """Make a hard link. Raises ``ChangedFilesError``: the file is not as we left it."""
        with self._as_left(content) as path:
            os.link(path, name, dst_dir_fd=folder)

    def relink(self, content: Digest, aside: Path, shown: Path) -> None:
        """Let a link take the place of what is ``shown`` there, in one step. Raises ``ChangedFilesError``."""
        with self._as_left(content) as path:
            aside.unlink(missing_ok=True)
            os.link(path, aside)
            aside.rename(shown)

    def give(self, content: Digest, name: bytes, folder: int, alike: Alike) -> bool:
        """Let the file itself go to where a copy of it was wanted: from then on it is not ours. False: it stays, and can be copied.

        It stays where it is not as we left it, where others have a name for it, or where it cannot be what a copy would be.
        Raises ``ChangedFilesError``: somebody wrote in the same moment; it has gone.
        """
        path = self._path(content)
        with self._lock:
            before = os.stat(path)
            if self._pins.get(content) != seen(before) or before.st_nlink != 1 or Alike.of(before) != alike:
                return False
            try:
                os.rename(path, name, dst_dir_fd=folder)
            except OSError as error:
                if error.errno not in _NO_RENAME:
                    raise
                return False
            del self._pins[content]
            after = os.stat(name, dir_fd=folder)
        if (after.st_mtime_ns, after.st_size) != (before.st_mtime_ns, before.st_size):
            raise ChangedFilesError((content,))
        return True

    @contextmanager
    def _as_left(self, content: Digest) -> Iterator[str]:
        path = self._path(content)
        with self._lock:
            before = os.stat(path)
            if self._pins.get(content) != seen(before):
                raise ChangedFilesError((content,))
            yield path
            if not self._follow(content, path, before):
                raise ChangedFilesError((content,))

    def unlink(self, content: Digest, name: str, folder: int) -> None:
        """Remove a view's name of the file, or of a copy of it."""
        own = self._path(content)
        with self._lock:
            try:
                before = os.stat(own)
            except FileNotFoundError:
                before = None
            os.unlink(name, dir_fd=folder)
            if before and self._pins.get(content) == seen(before):
                self._follow(content, own, before)

    def _follow(self, content: Digest, path: str, before: os.stat_result) -> bool:
        """Our link, rename or unlink has changed the change time. False: in the same moment somebody wrote, which changes the other, too."""
        after = os.stat(path)
        is_ours = (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
        if is_ours:
            self._pins[content] = seen(after)
        return is_ours

    # --- comparing ---

    def is_as_left(self, content: Digest, found: os.stat_result, look: Callable[[], os.stat_result]) -> bool:
        """Whether a file that was ``found`` is as we left it; ``look`` looks again."""
        if self._pins.get(content) == seen(found):
            return True
        with self._lock:  # a link of ours may have been under way
            return self._pins.get(content) == seen(look())

    def changed(self, contents: Iterable[Digest]) -> list[Digest]:
        """Those of these whole files that are not as we left them, or not there. One look at each."""
        found = []
        for content in contents:
            look = partial(os.stat, self._path(content))
            try:
                if not self.is_as_left(content, look(), look):
                    found.append(content)
            except FileNotFoundError:
                found.append(content)
        return found

    # --- what was found right ---

    def look(self, content: Digest) -> os.stat_result | None:
        """The file as it is now, before it is read; None when it is not there."""
        try:
            return os.stat(self._path(content))
        except OSError:
            return None

    def confirm(self, content: Digest, before: os.stat_result | None) -> None:
        """Its bytes were read and are right: pin it, unless it has changed since ``before``."""
        with self._lock:
            now = self.look(content)
            if before and now and seen(before) == seen(now):
                self._pins[content] = seen(now)

    def verify(self, content: Digest, size: int) -> bool:
        """Read the file, as whoever opens it would; one that is right is pinned. One that cannot be read is not right."""
        try:
            with opened(self._path(content), os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
                os.fdatasync(descriptor)  # a page that is mapped and written tells of it again only once it was clean
                before = os.fstat(descriptor)
                with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
                    pieces = map(digest_of, iter(lambda: file.read(CHUNK_SIZE), b""))
                    is_right = before.st_size == size and file_digest(size, pieces) == content
        except OSError:
            return False
        if is_right:
            self.confirm(content, before)
        return is_right

    def forget(self, contents: Iterable[Digest]) -> None:
        """They are not held any more."""
        for content in contents:
            with self._lock:
                self._pins.pop(content, None)

    # --- across restarts ---

    def save(self, manifest: Manifest) -> None:
        """Note the pins of a manifest's contents. Raises ``DiskFailedError``.

        Not synced: a pin that was lost costs reading the file once more.
        """
        path = self.places.pins(manifest.digest)
        with self._saving, disk_errors(path):
            pins = b"".join(self._pins.get(content, 0).to_bytes(_PIN_SIZE) for content in manifest.contents)
            write_at_once(path, _MAGIC + pins)

    def restore(self, found: Mapping[Digest, int], manifests: Iterable[Manifest]) -> set[Digest]:
        """At the start: compare what is ``found``, as ``seen``, with what was noted; returns those that differ.

        What no note tells of is pinned as it is found: an earlier version left it, or it was never handed on.
        """
        noted: set[Digest] = set()
        for manifest in manifests:
            for content, pin in self._noted(manifest):
                if found.get(content) == pin:
                    self._pins[content] = pin
                elif pin and content in found:
                    noted.add(content)
        differing = noted - self._pins.keys()
        for content in found.keys() - differing:
            self._pins[content] = found[content]
        return differing

    def _noted(self, manifest: Manifest) -> Iterable[tuple[Digest, int]]:
        try:
            content = self.places.pins(manifest.digest).read_bytes()
        except FileNotFoundError:
            return ()
        except OSError:
            content = b""
        pins = memoryview(content)[len(_MAGIC) :]
        if not content.startswith(_MAGIC) or len(pins) != _PIN_SIZE * len(manifest.contents):
            return ((one, 1) for one in manifest.contents)  # what it said is lost: like no file's times
        places = range(0, len(pins), _PIN_SIZE)
        return zip(manifest.contents, (int.from_bytes(pins[at : at + _PIN_SIZE]) for at in places), strict=True)

    def _path(self, content: Digest) -> str:
        return self._root + name_in_files(content)


def seen(status: os.stat_result) -> int:
    """What of a file's state is compared: when it was modified and changed. Its size is the manifest's business."""
    return (status.st_mtime_ns & _WORD) << 64 | status.st_ctime_ns & _WORD
