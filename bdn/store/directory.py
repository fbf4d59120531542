"""Chunks as files below a directory: the embedded default.

``chunks/aa/bb/<hex>`` holds whole chunks, read-only; ``incoming/`` holds what is being written, ``owner`` the id of the database that the store belongs to. A chunk is written aside,
synced, and appears under its name with one rename; the folder is synced before ``put`` returns. After a crash
``incoming/`` holds rubbish that nobody refers to, and ``chunks/`` holds nothing but whole chunks. What a disk has made of
them since is found by ``fault`` and kept in ``quarantine/``.

A chunk's time of modification says when it was last put or kept. Collecting beside others is a rename, a look and an unlink:
A sees a chunk that nobody names; B is about to need the same chunk, finds it there, and counts on it; A must not delete it.
So B changes its time *by its name*, and A moves it into ``aside/`` *before* looking at its time again. Either B's change came
first: then A sees it and puts the chunk back. Or the rename did: then B finds no chunk and writes it. What a crash leaves in
``aside/``, or a disk that fails, is put back by whoever opens the store or collects next; readers look there as well.
"""

import errno
import io
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from blake3 import blake3

from bdn.core.chunk import CHUNK_SIZE, Buffer, Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.core.store import StoredChunk, StoreDisk
from bdn.disk.direct import DirectFile, DirectWrites
from bdn.disk.durable import kept_key, make_folder, sync_folder

_PRIVATE: Final = 0o700  # chunks are tenants' bytes: other users of the machine read none
KEPT: Final = 64  # chunks in quarantine; the oldest go


class DirectoryStore:
    """A ``MirrorStore`` in ``root``, which is made if it is absent. Safe for several threads and processes at once."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock
        self._chunks = root / "chunks"
        self._incoming = root / "incoming"
        self._quarantine = root / "quarantine"
        self._aside = root / "aside"
        self._nonce = os.urandom(4).hex()
        self._numbers = itertools.count()  # a count can be shared by threads; a generator cannot
        self._durable: set[Path] = set()  # folders of chunks whose names this process has synced
        self._writes = DirectWrites()
        with self._failures_mapped():
            make_folder(self._root, is_durable=True)
            make_folder(self._chunks, _PRIVATE, is_durable=True)
            make_folder(self._incoming, _PRIVATE)
            make_folder(self._aside, _PRIVATE, is_durable=True)
            self._put_all_back()
            self._writes.probe(self._incoming)

    def check(self) -> None:
        """By the folder of all chunks. When it cannot be reached, a chunk that cannot says nothing about that chunk."""
        # The dot: to look it up takes what it takes to look up a chunk.
        with self._failures_mapped(), os.scandir(f"{self._chunks}/.") as found:
            next(found, None)

    def disk(self) -> StoreDisk:
        """Its disk."""
        with self._failures_mapped():
            found, device = os.statvfs(self._root), self._root.stat().st_dev
        return StoreDisk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, device, str(self._root))

    def owner(self, new: str | None = None, *, replace: bool = False) -> str | None:
        """In the file ``owner``."""
        path = self._root / "owner"
        with self._failures_mapped():
            if new is not None:
                if replace:
                    path.unlink(missing_ok=True)
                return kept_key(path, new.encode).decode("utf-8", "replace").strip()
            with suppress(FileNotFoundError):
                return path.read_bytes().decode("utf-8", "replace").strip()
        return None

    def clear_incoming(self) -> None:
        """Remove what a crash left half-written. Only while no other process writes here."""
        with self._failures_mapped():
            for path in self._incoming.iterdir():
                path.unlink(missing_ok=True)

    def put(self, digest: Digest, content: Buffer, *, writer: str = "") -> None:  # noqa: ARG002 - a disk has no turns
        """Write, sync, rename, sync the folder. One that is there is read, and replaced when it is not what its name says.

        Otherwise whoever fetches a chunk again because the one here is wrong would leave the wrong one.
        """
        target = self._chunks / digest.fanout
        with self._failures_mapped():
            if self._keep_if_right(target, digest):
                sync_folder(target.parent)  # whoever renamed it may not have come to this, or have failed in it
                return
            partial = self._incoming / self._own_name()
            try:
                self._write_synced(partial, content)
                self._make_fanout(target.parent)
                with suppress(PermissionError):  # nobody can look at it, and it may have been right
                    self._quarantine_if_wrong(target, digest)
                partial.rename(target)
            except OSError:
                with suppress(OSError):  # the first failure says more
                    partial.unlink()
                raise
            sync_folder(target.parent)

    def open(self, digest: Digest, *, reader: str | None = None) -> BinaryIO:  # noqa: ARG002 - needs no memory
        """The chunk's file."""
        with self._failures_mapped():
            target = self._chunks / digest.fanout
            with suppress(FileNotFoundError):
                return target.open("rb", buffering=0)
            for path in (*self._aside.glob(f"{digest.hex}*"), target):  # it may be put back between two looks
                with suppress(FileNotFoundError):
                    return path.open("rb", buffering=0)
            self._check_is_there()
            raise NotFoundError(f"chunk {digest}")

    def keep(self, digests: Sequence[Digest]) -> set[Digest]:
        """Change the times of the chunks' files."""
        with self._failures_mapped():
            return {digest for digest in digests if self._keep(digest)}

    def close(self) -> None:
        """Nothing is open."""

    def stored(self, digests: Iterable[Digest] | None = None) -> Iterator[StoredChunk]:
        """Files with their times. Of all, also what a collector could move aside and not unlink."""
        with self._failures_mapped():
            self._check_is_there()
            if digests is None:
                self._put_all_back()
            for digest in self._every_digest() if digests is None else digests:
                with suppress(FileNotFoundError):
                    found = (self._chunks / digest.fanout).stat()
                    yield StoredChunk(digest, found.st_size, found.st_mtime)

    def _every_digest(self) -> Iterator[Digest]:
        """What stands in its place under the name of a chunk. Anything else is not ours, such as what NFS makes of a file that is open."""
        for above in _entries(self._chunks):
            for folder in _entries(self._chunks / above):
                for name in _entries(self._chunks / above / folder):
                    with suppress(ValueError):
                        digest = Digest(name)
                        if digest.fanout == f"{above}/{folder}/{name}":
                            yield digest

    def collect(self, chunks: Sequence[StoredChunk]) -> list[StoredChunk]:
        """One by one: move the file aside, look at its time again, and unlink it or put it back."""
        return [chunk for chunk in chunks if self._collect(chunk)]

    def _collect(self, chunk: StoredChunk) -> bool:
        """False when it is not as it was seen, or not there.

        The name that it has aside is this call's own. Under one name, A looks at the chunk's time; it is put anew; another
        collector moves that over A's; and A unlinks what is younger than what it looked at.
        """
        target = self._chunks / chunk.digest.fanout
        aside = self._aside / f"{chunk.digest.hex}-{self._own_name()}"
        # Nothing is found when somebody else collects it, or puts back what is aside.
        with self._failures_mapped(), suppress(FileNotFoundError):
            target.rename(aside)
            if aside.stat().st_mtime == chunk.kept_at:
                aside.unlink()
                return True
            self._put_back(aside, target)
        return False

    def drop_leftovers(self, before: float, *, dry_run: bool) -> tuple[int, int]:
        """Files in ``incoming/``."""
        sizes: list[int] = []
        with self._failures_mapped():
            for path in self._incoming.iterdir():
                with suppress(FileNotFoundError):  # its writer renames it, or clears it away
                    found = path.stat()
                    if found.st_mtime < before:
                        if not dry_run:
                            path.unlink()
                        sizes.append(found.st_size)
        return len(sizes), sum(sizes)

    def _own_name(self) -> str:
        """Nobody else's, in whatever process."""
        return f"{os.getpid()}-{self._nonce}-{next(self._numbers)}"

    def _keep(self, digest: Digest) -> bool:
        now = self._clock()
        try:
            os.utime(self._chunks / digest.fanout, (now, now))
        except FileNotFoundError:
            self._check_is_there()
            return False
        return True

    def _keep_if_right(self, target: Path, digest: Digest) -> bool:
        with suppress(FileNotFoundError, PermissionError):  # somebody moved it away meanwhile; nobody can tell
            return self._keep(digest) and not is_wrong(target, digest)
        return False

    def _put_all_back(self) -> None:
        for path in self._aside.iterdir():
            with suppress(ValueError):  # nothing of ours
                self._put_back(path, self._chunks / Digest(path.name.partition("-")[0]).fanout)

    @staticmethod
    def _put_back(aside: Path, target: Path) -> None:
        """Never in place of one that was put meanwhile: whoever put it counts on its time, which is later."""
        with suppress(FileNotFoundError):  # whoever moved it aside unlinked it, or put it back
            with suppress(FileExistsError):
                target.hardlink_to(aside)
            sync_folder(target.parent)
            aside.unlink()

    def _check_is_there(self) -> None:
        """Raise when the store itself is gone: nobody may conclude that it never held a chunk."""
        self._chunks.stat()

    def fault(self, digest: Digest) -> str | None:
        """By reading all of it past the page cache. One that cannot be read where others can is wrong.

        That may be its folder's doing, or the folder's above it; what cannot be looked into is then only a part of the store.
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
                self.check()  # otherwise it is the store that cannot be read
                return unreadable(error.__cause__)

    def set_aside(self, digest: Digest) -> bool:
        """One rename; the folder is synced. What may not be read stays until right bytes take its place: it may be right."""
        target = self._chunks / digest.fanout
        with self._failures_mapped():
            is_gone = self._quarantine_if_wrong(target, digest)
            if is_gone:
                sync_folder(target.parent)
        return is_gone

    def evidence(self) -> int:
        """Files in ``quarantine/``."""
        with self._failures_mapped():
            return len(self._quarantined())

    def _quarantine_if_wrong(self, path: Path, digest: Digest) -> bool:
        """Move the file into quarantine if it is wrong. False when there is none, or it is right and stays where it is.

        A and B read wrong bytes; A moves them, and right ones take their place; B comes to move what it has seen. So what was
        moved is read once more and, if it is right, given back. Meanwhile nobody finds it: readers take that for a failure
        that passes.
        """
        try:
            if not is_wrong(path, digest):
                return False
            make_folder(self._quarantine, _PRIVATE)
            taken = (
                self._quarantine / f"{time.time_ns()}-{digest.hex}"
            )  # when it was found, and what it should have been
            path.rename(taken)
        except FileNotFoundError:
            return False
        was_wrong = is_wrong(taken, digest)
        if not was_wrong:
            with suppress(FileExistsError):
                path.hardlink_to(taken)
            taken.unlink()
        for name in self._quarantined()[:-KEPT]:
            (self._quarantine / name).unlink(missing_ok=True)
        return was_wrong

    def _quarantined(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(path.name for path in self._quarantine.iterdir())
        return []

    def _write_synced(self, path: Path, content: Buffer) -> None:
        file, now = DirectFile(path, self._writes), self._clock()
        try:
            file.open()
            file.write(memoryview(content), 0)
            os.fchmod(file.descriptor, 0o444)
            os.utime(file.descriptor, (now, now))
            os.fdatasync(file.descriptor)
        finally:
            file.close()

    def _make_fanout(self, folder: Path) -> None:
        """The folder for a chunk, durable: one that is there may be another thread's, or a killed process's, and not synced."""
        for one in (folder.parent, folder):
            if one not in self._durable or not one.is_dir():  # who mends a disk may take a folder away
                one.mkdir(exist_ok=True)
                sync_folder(one.parent)
                self._durable.add(one)

    @contextmanager
    def _failures_mapped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailableError(f"{self._root}: {error.strerror or error}") from error


def _entries(folder: Path) -> list[str]:
    """In order; none in what is gone, or is no folder. Raises ``OSError`` for one that cannot be looked into."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone: there may be millions
    return []


_PIECE: Final = 1024 * 1024
# What a disk answers for a sector that it has lost, and a file system for a file that is not one of ours any more, or not for
# us, or that lies in no folder. Any other failure, such as that of a server or of a process without descriptors, says nothing
# about the bytes.
_LOST: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})
_KEPT_FROM_US: Final = frozenset({errno.EPERM, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO})
_UNREADABLE: Final = _LOST | _KEPT_FROM_US | {errno.ENOTDIR}


def fault_of(file: BinaryIO, digest: Digest) -> str | None:
    """What is wrong with the chunk in this file, or None. Blocking; costs one read of it. Leaves nothing in the page cache.

    Raises ``OSError``: it could not be found out.
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
        return "it is longer than a chunk can be"
    actual = Digest(hasher.hexdigest())
    return None if actual == digest else f"its {size} bytes are {actual}"


def unreadable(error: OSError) -> str:
    """What is wrong with a chunk that cannot be opened or read. Raises the error when it says nothing about the chunk."""
    if error.errno not in _UNREADABLE:
        raise error
    return f"it cannot be read ({error.strerror})"


def leave_cache(file: BinaryIO) -> None:
    """Do not keep what was read of a file in the page cache, where jobs, or this machine's agent, keep theirs."""
    with suppress(io.UnsupportedOperation, OSError):  # a file in memory; a file system that has no such thing
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_wrong(path: Path, digest: Digest) -> bool:
    """Whether the file is not what its name says. Reads all of it."""
    with path.open("rb", buffering=0) as file:
        return fault_of(file, digest) is not None
