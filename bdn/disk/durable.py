"""Small files and folders that survive a power cut; ``disk_errors`` maps ``OSError`` to DISK_FAILED."""

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
    """Around disk work on ``path``: raises ``DiskFailedError`` with path and reason for an ``OSError``."""
    try:
        yield
    except OSError as error:
        name, reason = os.fsdecode(error.filename or path), error.strerror or str(error)
        reason += _REMEDIES.get(error.errno or 0, "")
        raise DiskFailedError(name, reason, is_full=error.errno == errno.ENOSPC) from error


def try_lock(descriptor: int, folder: Path) -> bool:
    """Lock a file in ``folder`` with ``flock(2)`` until it is closed. Returns False if another process has it.

    Raises ``DiskFailedError``: the file system or a sandbox does not support such locks.
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
    """Replace a file atomically and durably: write aside, sync, rename, sync the folder. Content may come in pieces."""
    _replace(path, content, mode, is_synced=True)
    sync_folder(path.parent)


def write_at_once(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a small file atomically, also across a kill. A power cut may undo it or leave the file empty."""
    _replace(path, content, mode, is_synced=False)


def kept_key(path: Path, new: Callable[[], bytes]) -> bytes:
    """Read the key file; create it, mode 0600, if absent. Raises ``DiskFailedError``."""
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
    # A link never replaces: of two processes that start together, the first one's key stays.
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    sync_folder(path.parent)  # signatures by this key stay valid after a power cut


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
    """Write all of ``content`` at ``offset``, across partial writes."""
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
    """The file, unbuffered; None if it is absent. Raises ``DiskFailedError``."""
    with disk_errors(path):
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            return None


def open_folder(folder: Path) -> AbstractContextManager[int]:
    """A descriptor for work relative to the folder, which saves a path lookup for each of thousands of files."""
    return opened(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_folder(folder: Path) -> None:
    with open_folder(folder) as descriptor:
        os.fsync(descriptor)


def sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


def make_folder(folder: Path, mode: int | None = None, *, is_durable: bool = False) -> None:
    """Make a folder and its absent parents. An existing folder stays unchanged.

    Args:
        folder: may exist.
        mode: exact, whatever the umask; None for the umask's default.
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


def nearest_folder(path: Path) -> Path:
    """The path, or its nearest parent, that is a directory for this user."""
    absolute = path.absolute()
    return next((one for one in (absolute, *absolute.parents) if os.path.isdir(one)), Path("/"))  # noqa: PTH112 - Path.is_dir raises without permission


def remove_tree(root: Path) -> None:
    """Remove a folder with its contents, a file or a link. No error if it is absent."""
    if root.is_symlink() or root.is_file():
        root.unlink(missing_ok=True)
    elif root.exists():
        shutil.rmtree(root)


def remove_empty(folder: Path, stop: Path) -> None:
    """Remove ``folder`` and its parents below ``stop`` while they are empty or absent."""
    while folder != stop and stop in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return  # not empty
        folder = folder.parent
