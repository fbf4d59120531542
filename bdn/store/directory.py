"""Chunks as files below a directory: the embedded default.

``chunks/aa/bb/<hex>`` are whole chunks, read-only; ``incoming/`` are chunks being written; ``owner`` is the id of the
database that owns the store. A chunk is written aside, synced and renamed to its name; the folder is synced before
``put`` returns. After a crash ``incoming/`` contains unreferenced garbage, and ``chunks/`` only whole chunks. Later
damage by the disk is found by ``fault`` and stored in ``quarantine/``.
"""

import errno
import io
import itertools
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.store import DELETE_SENT_SECONDS, NotDeletedError, StoreDisk, StoredObject
from bdn.disk.direct import DirectWrites, write_read_only
from bdn.disk.durable import kept_key, make_folder, sync_folder
from bdn.store.boot_clock import since_boot

_PRIVATE: Final = 0o700  # chunks are tenants' bytes: other users of the machine must not read them
KEPT: Final = 64  # chunks in quarantine; the oldest are removed


class DirectoryStore:
    """A ``MirrorStore`` in ``root``, which is created if absent. Safe for several threads and processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._quarantine = root / "quarantine"
        self._nonce = os.urandom(4).hex()
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot
        self._durable: set[Path] = set()  # folders whose names this process has synced
        self._writes = DirectWrites()
        with self._failures_mapped():
            make_folder(self._root, is_durable=True)
            make_folder(self._chunks, _PRIVATE, is_durable=True)
            make_folder(self._incoming, _PRIVATE)
            self._writes.probe(self._incoming)

    def check(self) -> None:
        """Reads the folder of all chunks. If that fails, an unreadable chunk says nothing about the chunk itself."""
        # The dot makes the kernel look up the folder as it does for a chunk.
        with self._failures_mapped(), os.scandir(f"{self._chunks}/.") as found:
            next(found, None)

    def disk(self) -> StoreDisk:
        with self._failures_mapped():
            found, device = os.statvfs(self._root), self._root.stat().st_dev
        return StoreDisk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, device, str(self._root))

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        path = self._root / "owner"
        with self._failures_mapped():
            if new is not None:
                if replace:
                    path.unlink(missing_ok=True)
                return kept_key(path, new.encode).decode("utf-8", "replace").strip()
            with suppress(FileNotFoundError):
                return path.read_bytes().decode("utf-8", "replace").strip()
        return None

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:  # noqa: ARG002 - a disk has no turns
        target = self._chunks / digest.fanout
        with self._failures_mapped():
            written = self._incoming / self._own_name()
            try:
                write_read_only(written, memoryview(content), self._writes)
                self._make_fanout(target.parent)
                written.rename(target)
            except OSError:
                with suppress(OSError):  # the first failure is more informative
                    written.unlink()
                raise
            sync_folder(target.parent)

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:  # noqa: ARG002 - needs no memory
        with self._failures_mapped():
            with suppress(FileNotFoundError):
                return (self._chunks / digest.fanout).open("rb", buffering=0)
            self._check_is_there()
            raise NotFoundError(f"chunk {digest}")

    def close(self) -> None:
        pass

    def delete(self, digests: Collection[Digest], *, began: float | None = None) -> None:
        """Unlink, then sync the folders, also of files already gone: an earlier unlink may not be synced."""
        until = (since_boot() if began is None else began) + DELETE_SENT_SECONDS
        failed: dict[Digest, OSError] = {}
        # All unlinks first: one sync then covers several of them.
        for step in (partial(_unlink, until), _sync_above):
            for digest in digests:
                try:
                    step(self._chunks / digest.fanout)
                except OSError as error:
                    failed[digest] = error
        with self._failures_mapped():
            self._check_is_there()
        for reason in map(self._reason, failed.values()):
            raise NotDeletedError(reason, frozenset(failed))

    def listed(self) -> Iterator[StoredObject]:
        with self._failures_mapped():
            self._check_is_there()
            for digest in self._every_digest():
                with suppress(FileNotFoundError):
                    yield StoredObject(digest, (self._chunks / digest.fanout).stat().st_size)

    def _every_digest(self) -> Iterator[Digest]:
        """Files at a chunk's path. Other files are not ours, such as NFS's names of open deleted files."""
        for above in _entries(self._chunks):
            for folder in _entries(self._chunks / above):
                for name in _entries(self._chunks / above / folder):
                    with suppress(ValueError):
                        digest = Digest(name)
                        if digest.fanout == f"{above}/{folder}/{name}":
                            yield digest

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        sizes: list[int] = []
        with self._failures_mapped():
            for path in self._incoming.iterdir():
                with suppress(FileNotFoundError):  # renamed or removed by its writer
                    found = path.stat()
                    if found.st_mtime < before:
                        if not dry_run:
                            path.unlink()
                        sizes.append(found.st_size)
        return len(sizes), sum(sizes)

    def _own_name(self) -> str:
        return f"{os.getpid()}-{self._nonce}-{next(self._numbers)}"

    def _check_is_there(self) -> None:
        """Raise if the store itself is gone, so that no caller concludes that a chunk was never there."""
        self._chunks.stat()

    def fault(self, digest: Digest) -> str | None:
        """Reads the whole chunk past the page cache. A chunk that cannot be read in a readable store is wrong.

        The cause may be its folder, or the folder above; then only that part of the store is unreadable.
        """
        with self._failures_mapped():
            try:
                with self.open(digest) as file:
                    return fault_of(file, digest)
            except NotFoundError:
                return "it is absent"
            except StoreUnavailableError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                self.check()  # raises if the whole store is unreadable
                return unreadable(error.__cause__)

    def set_aside(self, digest: Digest) -> bool:
        """Link the file into quarantine. ``StoreUnavailableError`` if reading is denied: the chunk may be right."""
        path = self._chunks / digest.fanout
        taken = self._quarantine / f"{time.time_ns()}-{digest.hex}"  # when it was found, and the expected digest
        with self._failures_mapped(), suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            if fault_of(file, digest) is None:
                return False
            make_folder(self._quarantine, _PRIVATE)
            taken.hardlink_to(path)
            if not os.path.samestat(os.fstat(file.fileno()), taken.stat()):  # replaced by right bytes meanwhile
                taken.unlink()
                return False
            for name in self._quarantined()[:-KEPT]:
                (self._quarantine / name).unlink(missing_ok=True)
            return True
        return False

    def evidence(self) -> int:
        with self._failures_mapped():
            return len(self._quarantined())

    def _quarantined(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self._quarantine.iterdir())
        return []

    def _make_fanout(self, folder: Path) -> None:
        """Make a chunk's folder durable: another thread or a killed process may have made it, and not synced."""
        for one in (folder.parent, folder):
            if one not in self._durable or not one.is_dir():  # an operator may have removed it while repairing the disk
                one.mkdir(exist_ok=True)
                sync_folder(one.parent)
                self._durable.add(one)

    @contextmanager
    def _failures_mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailableError(self._reason(error)) from error

    def _reason(self, error: OSError) -> str:
        return f"{self._root}: {error.strerror or error}"


def _unlink(until: float, path: Path) -> None:
    if since_boot() > until:
        raise TimeoutError(errno.ETIMEDOUT, "the deletion waited too long, and was not done")
    path.unlink(missing_ok=True)


def _sync_above(path: Path) -> None:
    with suppress(FileNotFoundError):  # never contained a chunk
        sync_folder(path.parent)


def _entries(folder: Path) -> list[str]:
    """Sorted names; empty if the folder is absent or not a folder. Raises ``OSError`` if it cannot be read."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone: there may be millions
    return []


_PIECE: Final = 1024 * 1024
# Errors for a lost sector; and errors of a file system for a file that is damaged, denied, of another type, or below
# something that is not a folder. Any other error, such as a server's, or of a process without descriptors, says nothing
# about the bytes.
_LOST: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})
_KEPT_FROM_US: Final = frozenset({errno.EPERM, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_UNREADABLE: Final = _LOST | _KEPT_FROM_US | {errno.ENOTDIR}


def fault_of(file: BinaryIO, digest: Digest) -> str | None:
    """What is wrong with the chunk in this file, or None. Blocking; one read, which leaves nothing in the page cache.

    Raises ``OSError`` if that cannot be determined.
    """
    leave_cache(file)
    hasher, piece, size = blake3(), bytearray(_PIECE), 0
    try:
        while size <= CHUNK_SIZE and (count := file.readinto(piece)):  # type: ignore[attr-defined] # as in the copier
            hasher.update(memoryview(piece)[:count])
            size += count
    except OSError as error:
        return unreadable(error)
    leave_cache(file)
    if size > CHUNK_SIZE:
        return "it is larger than a chunk can be"
    actual = Digest(hasher.hexdigest())
    return None if actual == digest else f"its {size} bytes have the digest {actual}"


def unreadable(error: OSError) -> str:
    """The fault of a chunk that cannot be opened or read. Raises the error if it says nothing about the chunk."""
    if error.errno not in _UNREADABLE:
        raise error
    return f"it cannot be read ({error.strerror})"


def leave_cache(file: BinaryIO) -> None:
    """Drop the file's pages from the page cache, which jobs and this machine's agent need."""
    with suppress(io.UnsupportedOperation, OSError):  # a file in memory, or a file system without advice
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
