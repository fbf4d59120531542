"""What processes cost, and which of their files are in memory."""

import ctypes
import mmap
import os
from pathlib import Path


def peak_megabytes(pid: int) -> float:
    """``VmHWM``: the most memory that was ever resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_libc = ctypes.CDLL(None, use_errno=True)


def resident_bytes(path: Path) -> int:
    """How many of the file's bytes are in memory now, to the page."""
    size = path.stat().st_size
    if not size:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        result = _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found)
        del start
    if result:
        raise OSError(ctypes.get_errno(), "mincore")
    return min(size, sum(page & 1 for page in found) * mmap.PAGESIZE)


def drop_from_memory(path: Path) -> None:
    """Let the kernel forget the file's clean pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
