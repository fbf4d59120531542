"""The folder of whole files, and each file's pin: its times when its bytes were known to be right.

A hard link gives other users access to the cache's own file: root can write to it, and so can its owner after a chmod.
Writing changes the modification time; setting that back changes the change time. A file that differs from its pin is
verified before it is handed on (docs/adr/0032).
"""

# ruff: noqa: PTH104, PTH116 - these calls are made for each of a million files, and a Path costs as much as the call

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.cache.digest_table import DigestTable
from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of, file_digest
from bdn.core.layout import Manifest
from bdn.disk.durable import disk_errors, opened, write_at_once
from node_agent.disk.places import Places, name_in_files

_MAGIC: Final = b"bdnpins1"
_PIN_SIZE: Final = 16  # bytes: modification and change time in nanoseconds; zeros without a pin
_WORD: Final = (1 << 64) - 1


class ChangedFilesError(Exception):
    """Whole files differ from their pins: their bytes may be wrong. Verify them before handing them on."""

    def __init__(self, contents: Iterable[Digest]) -> None:
        super().__init__()
        self.contents = tuple(contents)


class WholeFiles:
    """All changes to and comparisons of whole files' times are done here. Blocking; thread-safe."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._root = f"{places.files}/"
        self._lock = threading.Lock()  # held while a file's times change, until its pin is updated
        self._pins = DigestTable(width=_PIN_SIZE)
        self._saving = threading.Lock()  # stages of one manifest write the same file

    # --- operations on files; methods raise ``OSError`` ---

    def appear(self, content: Digest, aside: str | os.PathLike[str]) -> None:
        """Rename a verified file to its name, and pin it."""
        path = self._path(content)
        with self._lock:
            os.rename(aside, path)
            self._pins[content] = seen(os.stat(path))

    def link(self, content: Digest, name: bytes | str, folder: int | None = None) -> None:
        """Make a hard link. Raises ``ChangedFilesError``: the file differs from its pin."""
        with self._as_left(content) as path:
            os.link(path, name, dst_dir_fd=folder)

    def relink(self, content: Digest, aside: Path, shown: Path) -> None:
        """Atomically replace ``shown`` with a link. Raises ``ChangedFilesError``."""
        with self._as_left(content) as path:
            aside.unlink(missing_ok=True)
            os.link(path, aside)
            aside.rename(shown)

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
        """Remove a view's name of the file, or a view's copy of it."""
        with self._renaming(content):
            os.unlink(name, dir_fd=folder)

    def move(self, content: Digest, name: Path, shown: Path) -> None:
        """Rename a view's name of the file, or a view's copy of it."""
        with self._renaming(content):
            name.rename(shown)

    @contextmanager
    def _renaming(self, content: Digest) -> Iterator[None]:
        own = self._path(content)
        with self._lock:
            try:
                before = os.stat(own)
            except FileNotFoundError:
                before = None
            yield
            if before and self._pins.get(content) == seen(before):
                self._follow(content, own, before)

    def _follow(self, content: Digest, path: str, before: os.stat_result) -> bool:
        """Update the pin: a link, rename or unlink of ours has changed the change time.

        Returns False if the modification time changed, too: another process wrote at the same moment.
        """
        after = os.stat(path)
        is_ours = (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
        if is_ours:
            self._pins[content] = seen(after)
        return is_ours

    # --- comparing ---

    def is_as_left(self, content: Digest, found: os.stat_result, look: Callable[[], os.stat_result]) -> bool:
        """Whether a file with the status ``found`` matches its pin; ``look`` returns its status again."""
        if self._pins.get(content) == seen(found):
            return True
        with self._lock:  # a link of ours may have been in progress
            return self._pins.get(content) == seen(look())

    def changed(self, contents: Iterable[Digest]) -> list[Digest]:
        """The whole files that differ from their pins or are absent. Costs one ``stat`` each."""
        found = []
        for content in contents:
            look = partial(os.stat, self._path(content))
            try:
                if not self.is_as_left(content, look(), look):
                    found.append(content)
            except FileNotFoundError:
                found.append(content)
        return found

    # --- pins of verified files ---

    def look(self, content: Digest) -> os.stat_result | None:
        """The file's status, before it is read; None if it is absent."""
        try:
            return os.stat(self._path(content))
        except OSError:
            return None

    def confirm(self, content: Digest, before: os.stat_result | None) -> None:
        """Pin a verified file, unless it has changed since ``before``."""
        with self._lock:
            now = self.look(content)
            if before and now and seen(before) == seen(now):
                self._pins[content] = seen(now)

    def verify(self, content: Digest, size: int) -> bool:
        """Read and verify the file, and pin it if it is right. A file that cannot be read is not right."""
        try:
            with opened(self._path(content), os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
                os.fdatasync(descriptor)  # a mapped page updates the times at a write only after it was clean
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
        for content in contents:
            with self._lock:
                self._pins.pop(content, None)

    # --- across restarts ---

    def save(self, manifest: Manifest) -> None:
        """Write down the pins of a manifest's contents. Raises ``DiskFailedError``.

        Not synced: a lost pin costs one more read of the file.
        """
        path = self.places.pins(manifest.digest)
        with self._saving, disk_errors(path):
            pins = b"".join(self._pins.get(content, 0).to_bytes(_PIN_SIZE) for content in manifest.contents)
            write_at_once(path, _MAGIC + pins)

    def restore(self, found: Mapping[Digest, int], manifests: Iterable[Manifest]) -> set[Digest]:
        """At the start: compare files ``found``, as of ``seen``, with the saved pins. Returns the files that differ.

        A file without a saved pin is pinned as found: it was never handed on.
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
            return ((one, 1) for one in manifest.contents)  # damaged: a pin that matches no file's times
        places = range(0, len(pins), _PIN_SIZE)
        return zip(manifest.contents, (int.from_bytes(pins[at : at + _PIN_SIZE]) for at in places), strict=True)

    def _path(self, content: Digest) -> str:
        return self._root + name_in_files(content)


def seen(status: os.stat_result) -> int:
    """The compared part of a file's status: modification and change time. The manifest has its size."""
    return (status.st_mtime_ns & _WORD) << 64 | status.st_ctime_ns & _WORD
