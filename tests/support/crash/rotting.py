"""What disks do to a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Final


def rot(path: Path, how: str) -> None:
    """From now on the file is not what was written. Its inode stays, unless it is gone or cannot be read."""
    if path.exists():
        path.chmod(0o644)
    HOW[how](path)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def _zero(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))


def _fail(path: Path) -> None:
    """Every read of it is EIO: the first page of a process is never mapped (proc(5))."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


HOW: Final[dict[str, Callable[[Path], None]]] = {
    "flipped": _flip,
    "truncated": _truncate,
    "zeroed": _zero,
    "absent": Path.unlink,
    "unreadable": _fail,
}
