"""Small files and folders that survive a power cut; ``disk_errors`` maps the disk's errors to ours."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from bdn.core.errors import DiskFailedError

_OTHER: Final = "; BDN_DATA_DIR and BDN_AGENT_CACHE_DIR name directories that this user may write to"
_REMEDIES: Final = {
    errno.EDQUOT: "; the cache may have no more than its quota: set BDN_AGENT_CACHE_BYTES below it",
    **dict.fromkeys((errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EPERM), _OTHER),
}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Around disk work on ``path``: an ``OSError`` is DISK_FAILED with the path and the reason."""
    try:
        yield
    except OSError as error:
        name, reason = os.fsdecode(error.filename or path), error.strerror or str(error)
        reason += _REMEDIES.get(error.errno or 0, "")
        raise DiskFailedError(name, reason, is_full=error.errno == errno.ENOSPC) from error


def try_lock(descriptor: int, folder: Path) -> bool:
    """``flock(2)`` of a file in ``folder``, exclusive, until it is closed. False: another process has it.

    Raises ``DiskFailedError``: the file system, or a sandbox, has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        reason = (
            f"its files cannot be locked ({error.strerror}), and without a lock two processes could write there; name a directory on "
            "a local disk in BDN_DATA_DIR or BDN_AGENT_CACHE_DIR, or let the sandbox permit flock"
        )
        raise DiskFailedError(str(folder), reason) from error
    return True


def write_durably(path: Path, content: bytes | Iterator[bytes], mode: int = 0o600) -> None:
    """Replace a file, whose content may come in pieces: written aside, synced, renamed, and the folder synced. Old or new, never half."""
    _replace(path, content, mode, is_synced=True)
    sync_folder(path.parent)


def write_at_once(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a small file, old or new for whoever kills us. A power cut may undo it or leave the file empty."""
    _replace(path, content, mode, is_synced=False)


def kept_key(path: Path, new: Callable[[], bytes]) -> bytes:
    """The key in this file, readable by its owner alone, which is made when there is none. Raises ``DiskFailedError``."""
    with disk_errors(path):
        if not path.exists():
            _make_key(path, new())
        return path.read_bytes()


def _make_key(path: Path, key: bytes) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    partial.touch(mode=0o600, exist_ok=False)
    with partial.open("wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    # A link never replaces: of two that start together, the first one's key stays.
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    sync_folder(path.parent)  # what was signed stays good, whatever becomes of the power


def _replace(path: Path, content: bytes | Iterator[bytes], mode: int, *, is_synced: bool) -> None:
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with opened(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=mode) as descriptor:
            offset = 0
            for piece in (content,) if isinstance(content, bytes) else content:
                write_all(descriptor, memoryview(piece), offset)
                offset += len(piece)
            if is_synced:
                os.fsync(descriptor)
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of it at ``offset``, however many calls the kernel takes."""
    while content:
        count = os.pwrite(descriptor, content, offset)
        content, offset = content[count:], offset + count


@contextmanager
def opened(
    path: str | bytes | os.PathLike[str], flags: int, folder: int | None = None, mode: int = 0o600
) -> Iterator[int]:
    """A descriptor until the block ends. The path is relative to the descriptor ``folder``, if given."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_existing(path: Path) -> BinaryIO | None:
    """The file, unbuffered; None when there is none. Raises ``DiskFailedError``."""
    with disk_errors(path):
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            return None


def open_folder(folder: Path) -> AbstractContextManager[int]:
    """A descriptor for work relative to the folder, which saves looking up its path for each of thousands of files."""
    return opened(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable."""
    with open_folder(folder) as descriptor:
        os.fsync(descriptor)


def sync_folders(root: Path) -> None:
    """Make every name below ``root`` durable."""
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


def make_folder(folder: Path, mode: int | None = None, *, is_durable: bool = False) -> None:
    """Make a folder and its parents, as far as they are absent; one that exists stays as it is.

    Args:
        folder: may exist.
        mode: exactly that, whatever the umask; None for what the umask leaves.
        is_durable: sync each new name, so that it survives a power cut.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode, is_durable=is_durable)
    folder.mkdir(exist_ok=True)
    if mode is not None:
        folder.chmod(mode)
    if is_durable:
        sync_folder(folder.parent)


def remove_tree(root: Path) -> None:
    """Remove a folder and everything below it, or a file or link; an absent one changes nothing."""
    if root.is_symlink() or root.is_file():
        root.unlink(missing_ok=True)
    elif root.exists():
        shutil.rmtree(root)


def remove_empty(folder: Path, stop: Path) -> None:
    """Remove ``folder`` and its parents below ``stop`` as far as they are empty or absent."""
    while folder != stop and stop in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # not empty: something else needs it
        folder = folder.parent
