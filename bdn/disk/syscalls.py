"""Linux calls missing from the standard library. Failures raise ``OSError`` with the path."""

import ctypes
import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

# The kernel or the file system lacks the call; or a sandbox filters it, usually with EPERM or EACCES.
REFUSED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES})

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_MOVE: Final = 0x2000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 0x2
UMOUNT_NOFOLLOW: Final = 0x8
_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE: Final = 428  # on every architecture that Python supports; glibc has functions for these since 2.36
_MOVE_MOUNT: Final = 429
_OPENAT2: Final = 437
_MOUNT_SETATTR: Final = 442
_OPEN_TREE_CLONE: Final = 0x1
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
_MOUNT_ATTR: Final = 0x1 | 0x2 | 0x4  # read-only, nosuid, nodev
_MOUNT_ATTR_IDMAP: Final = 0x100000
_RESOLVE_NO_SYMLINKS: Final = 0x4  # nor links of /proc
_RENAME_EXCHANGE: Final = 0x2
_FICLONE: Final = 0x40049409
_FALLOC_FL_KEEP_SIZE: Final = 0x1
_FALLOC_FL_PUNCH_HOLE: Final = 0x2
_STATX_BTIME: Final = 0x800
_STATX_BTIME_AT: Final = 80  # bytes into struct statx, on every architecture
_STATX_SIZE: Final = 256
_FILE_SYSTEMS: Final = {  # linux/magic.h, and the manual page of statfs(2)
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "cifs",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x01021997: "9p",
}
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "riscv64": 30}
_IOPRIO_WHO_PROCESS: Final = 1  # with id 0: the calling thread
_IOPRIO_IDLE: Final = 3 << 13


def trim_heaps() -> None:
    """``malloc_trim(3)``: return freed memory to the system, also from between used blocks. No-op without glibc."""
    with suppress(AttributeError):
        _libc.malloc_trim(ctypes.c_size_t(0))


def allocate(descriptor: int, size: int) -> None:
    """``fallocate(2)``: allocate the first ``size`` bytes, without glibc's emulation, which writes them all."""
    _check(_libc.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)), "")


def punch_hole(descriptor: int, offset: int, size: int) -> None:
    """``fallocate(2)``: free the blocks of a range, which then reads as zeros. The file's size stays."""
    if size > 0:
        mode, start, length = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(size)
        _check(_libc.fallocate(descriptor, mode, start, length), "")


def prefer_others() -> None:
    """``ioprio_set(2)``: give this thread idle I/O priority. No effect if the disk's scheduler ignores it.

    CPU priority stays: a thread that holds the GIL and does not run would block all other threads.
    """
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:  # a sandbox may forbid it, which changes only the priority
        _libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


def sync_file_system(descriptor: int) -> bool:
    """``syncfs(2)``: make everything written to this file system durable. Reports errors since Linux 5.8, once.

    Returns False if a sandbox refuses the call; nothing was synced then.
    """
    result = _libc.syncfs(descriptor)
    if result < 0 and ctypes.get_errno() in REFUSED:
        return False
    _check(result, "")
    return True


def file_system_magic(descriptor: int) -> int:
    """``f_type`` of ``fstatfs(2)``: the type of the file system."""
    found = (ctypes.c_long * 64)()  # struct statfs is 120 bytes, and f_type is its first field
    _check(_libc.fstatfs(descriptor, ctypes.byref(found)), "")
    return int(found[0])


def file_system_name(descriptor: int) -> str:
    """Such as ``xfs``. ``ext4`` also means ext2 and ext3, which have the same magic number."""
    magic = file_system_magic(descriptor) & 0xFFFFFFFF
    return _FILE_SYSTEMS.get(magic, f"file system {magic:#x}")


def birth_time(descriptor: int) -> int | None:
    """``statx(2)``: the birth time of a file in ns since 1970, which no program can change. None if unknown.

    Some file systems do not store it, and some sandboxes refuse the call.
    """
    found = ctypes.create_string_buffer(_STATX_SIZE)
    try:
        result = _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_BTIME, found)
    except AttributeError:  # glibc before 2.28, and some other C libraries
        return None
    if result < 0 and ctypes.get_errno() in REFUSED:
        return None
    _check(result, "")
    if not struct.unpack_from("=I", found)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", found, _STATX_BTIME_AT)
    return int(seconds * 10**9 + nanoseconds)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def attach_read_only(source: Path, target: Path, owners: int | None = None) -> None:
    """``open_tree(2)``, ``mount_setattr(2)``, ``move_mount(2)``: bind ``source`` at ``target``.

    The mount is private, read-only, nosuid and nodev before it is attached, and so are its copies that other mount
    namespaces get by propagation. ``ENOSYS`` before Linux 5.12.

    ``owners`` is a user namespace: the mount shows files without an owner if their owner is not in it. ``EINVAL``:
    the file system cannot do that.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags), str(source))
    try:
        attributes = _MountAttr(attr_set=_MOUNT_ATTR, propagation=MS_PRIVATE)
        if owners is not None:
            attributes.attr_set |= _MOUNT_ATTR_IDMAP
            attributes.userns_fd = owners
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _check(_libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size), str(target))
        place = os.fsencode(target)
        _check(_libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place, _MOVE_MOUNT_F_EMPTY_PATH), str(target))
    finally:
        os.close(tree)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_without_links(folder: Path) -> int:
    """``openat2(2)``: a descriptor of the directory, for ``/proc/self/fd`` alone. ``ENOSYS`` before Linux 5.6.

    ``ELOOP``: a part of the path is a symbolic link.
    """
    how = _OpenHow(os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_NO_SYMLINKS)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    return _check(_libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(folder), ctypes.byref(how), size), str(folder))


def mount(source: Path | None, target: Path, flags: int) -> None:
    """``mount(2)`` without a file system type, for bind mounts."""
    _check(_libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None), str(target))


def unmount(target: Path, flags: int = 0) -> None:
    """``umount2(2)``, never through a symbolic link. ``EINVAL``: nothing is mounted there."""
    _check(_libc.umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW), str(target))


def exchange(first: Path, second: Path) -> None:
    """``renameat2(2)``: exchange two names atomically."""
    names = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    _check(_libc.renameat2(*names, _RENAME_EXCHANGE), str(second))


def clone_file(source: int, target: int) -> None:
    """``FICLONE``: the target shares the source's blocks (xfs, btrfs, bcachefs, and others)."""
    fcntl.ioctl(target, _FICLONE, source)


def _check(result: int, path: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
