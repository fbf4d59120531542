"""Chunks as files below a directory: the embedded default.

``chunks/aa/bb/<hex>`` holds whole chunks, read-only; ``incoming/`` holds what is being written. A chunk is written aside,
synced, and appears under its name with one rename; the folder is synced before ``put`` returns. After a crash
``incoming/`` holds rubbish that nobody refers to, and ``chunks/`` holds nothing but whole chunks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.ports import Buffer


class DirectoryStore:
    """A ``ChunkStore`` in ``root``, which is made if it is absent. Safe for several threads and processes at once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._nonce = os.urandom(4).hex()
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot
        with self._failures_mapped():
            _make_folder(self._chunks)
            self._incoming.mkdir(exist_ok=True)

    def clear_incoming(self) -> None:
        """Remove what a crash left half-written. Only while no other process writes here."""
        with self._failures_mapped():
            for path in self._incoming.iterdir():
                path.unlink(missing_ok=True)

    def put(self, digest: Digest, content: Buffer) -> None:
        """Write, sync, rename, sync the folder."""
        target = self._chunks / digest.fanout
        with self._failures_mapped():
            if target.exists():
                _sync_folder(target.parent)  # whoever renamed it may not have come to this, or have failed in it
                return
            partial = self._incoming / f"{os.getpid()}-{self._nonce}-{next(self._numbers)}"
            try:
                _write_synced(partial, content)
                _make_folder(target.parent)
                partial.rename(target)
            except OSError:
                with suppress(OSError):  # the first failure says more
                    partial.unlink()
                raise
            _sync_folder(target.parent)

    def open(self, digest: Digest) -> BinaryIO:
        """The chunk's file."""
        with self._failures_mapped():
            try:
                return (self._chunks / digest.fanout).open("rb", buffering=0)
            except FileNotFoundError:
                if not self._chunks.is_dir():
                    raise  # the store itself is gone: nobody may conclude that it never held the chunk
                raise NotFoundError(f"chunk {digest}") from None

    def delete(self, digest: Digest) -> None:
        """Unlink the chunk's file."""
        with self._failures_mapped():
            (self._chunks / digest.fanout).unlink(missing_ok=True)

    @contextmanager
    def _failures_mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailableError(f"{self._root}: {error.strerror or error}") from error


def _write_synced(path: Path, content: Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents so that they survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
