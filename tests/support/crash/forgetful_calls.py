"""What the kernel asks a file system for (include/uapi/linux/fuse.h, version 7.31), answered from ``Nodes``."""

import errno
import os
import re
import stat
import struct
import time
from typing import Final

from tests.support.crash.forgetful_nodes import ROOT, Node, Nodes, Refused

EPOCH: Final = 40  # bits: numbers of nodes are new to the kernel after each power loss, so that it has nothing cached
_ATTR: Final = struct.Struct("<6Q10I")
_SETATTR: Final = struct.Struct("<II6Q8I")
_WRITE: Final = 40
_KINDS: Final = {stat.S_IFDIR: 4, stat.S_IFREG: 8, stat.S_IFLNK: 10}

CALLS: Final = {
    int(code): name
    for code, name in re.findall(
        r"(\d+) (\w+)",
        "1 lookup, 3 getattr, 4 setattr, 5 readlink, 6 symlink, 8 mknod, 9 mkdir, 10 unlink, 11 rmdir, 12 rename, 13 link, 14 open, "
        "15 read, 16 write, 17 statfs, 18 release, 20 fsync, 25 flush, 27 opendir, 28 readdir, 29 releasedir, 30 fsyncdir, "
        "35 create, 43 fallocate, 45 rename2",
    )
}


class Calls:
    """One method per name of ``CALLS``: the node's number and the body in, the answer's body out. Raises ``Refused``."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.epoch = 0
        self._listings: dict[int, list[tuple[bytes, int]]] = {}
        self._handles = 0

    def inside(self, number: int) -> int:
        """The node that the kernel means."""
        if number == ROOT:
            return ROOT
        if number >> EPOCH != self.epoch:
            raise Refused(errno.ESTALE)
        return number & ((1 << EPOCH) - 1)

    # --- names ---

    def lookup(self, folder: int, body: memoryview) -> bytes:
        return self._entry(self.nodes.find(folder, _names(body)[0]))

    def symlink(self, folder: int, body: memoryview) -> bytes:
        name, leads = _names(body)
        return self._entry(self.nodes.create(folder, name, stat.S_IFLNK | 0o777, leads))

    def mknod(self, folder: int, body: memoryview) -> bytes:
        mode, _, umask = struct.unpack_from("<III", body)
        if not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
            raise Refused(errno.EPERM)
        return self._entry(self.nodes.create(folder, _names(body[16:])[0], mode & ~umask))

    def mkdir(self, folder: int, body: memoryview) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        name = _names(body[8:])[0]
        return self._entry(self.nodes.create(folder, name, stat.S_IFDIR | (mode & ~umask & 0o7777)))

    def create(self, folder: int, body: memoryview) -> bytes:
        _, mode, umask = struct.unpack_from("<III", body)
        node = self.nodes.create(folder, _names(body[16:])[0], stat.S_IFREG | (mode & ~umask & 0o7777))
        node.opened += 1
        return self._entry(node) + struct.pack("<QII", 0, 0, 0)

    def link(self, folder: int, body: memoryview) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        return self._entry(self.nodes.link(self.inside(old), folder, _names(body[8:])[0]))

    def unlink(self, folder: int, body: memoryview) -> bytes:
        name = _names(body)[0]
        number = self.nodes.find(folder, name).number
        self.nodes.unlink(folder, name)
        self.nodes.drop_unused(number)
        return b""

    def rmdir(self, folder: int, body: memoryview) -> bytes:
        self.nodes.rmdir(folder, _names(body)[0])
        return b""

    def rename(self, folder: int, body: memoryview) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        return self._rename(folder, target, 0, body[8:])

    def rename2(self, folder: int, body: memoryview) -> bytes:
        target, flags = struct.unpack_from("<QI", body)
        return self._rename(folder, target, flags, body[16:])

    def _rename(self, folder: int, target: int, flags: int, body: memoryview) -> bytes:
        old, new = _names(body)
        self.nodes.rename((folder, old), (self.inside(target), new), flags)
        return b""

    # --- one node ---

    def getattr(self, number: int, _: memoryview) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(self.nodes[number])

    def setattr(self, number: int, body: memoryview) -> bytes:
        valid, _, _, size, _, used, changed, _, used_ns, changed_ns, _, mode, *_ = _SETATTR.unpack_from(body)
        node = self.nodes[number]
        if valid & 1:
            node.mode = stat.S_IFMT(node.mode) | (mode & 0o7777)
        if valid & 8:
            self.nodes.resize(number, size)
        if valid & 16:
            node.used = time.time_ns() if valid & 128 else used * 10**9 + used_ns
        if valid & 32:
            node.changed = time.time_ns() if valid & 256 else changed * 10**9 + changed_ns
        return self.getattr(number, body)

    def readlink(self, number: int, _: memoryview) -> bytes:
        return bytes(self.nodes[number].content)

    def open(self, number: int, _: memoryview) -> bytes:
        self.nodes[number].opened += 1
        return struct.pack("<QII", 0, 0, 0)

    def read(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(memoryview(self.nodes[number].content)[offset : offset + size])

    def write(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", self.nodes.write(number, offset, body[_WRITE : _WRITE + size]), 0)

    def fallocate(self, number: int, body: memoryview) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise Refused(errno.EOPNOTSUPP)
        if offset + length > len(self.nodes[number].content):
            self.nodes.resize(number, offset + length)
        return b""

    def flush(self, _: int, __: memoryview) -> bytes:
        return b""

    def release(self, number: int, _: memoryview) -> bytes:
        self.nodes[number].opened -= 1
        self.nodes.drop_unused(number)
        return b""

    def fsync(self, number: int, _: memoryview) -> bytes:
        self.nodes[number].sync()
        return b""

    # --- folders and the whole ---

    def opendir(self, number: int, _: memoryview) -> bytes:
        """What is listed is what was there when it was opened, however much is removed meanwhile."""
        self._handles += 1
        self._listings[self._handles] = sorted(self.nodes[number].names.items())
        return struct.pack("<QII", self._handles, 0, 0)

    def readdir(self, _: int, body: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        entries = b""
        for position, (name, number) in enumerate(self._listings[handle][offset:], offset + 1):
            try:
                kind = _KINDS.get(stat.S_IFMT(self.nodes[number].mode), 0)
            except Refused:
                continue  # removed meanwhile
            entry = struct.pack("<QQII", number, position, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(entries) + len(entry) > size:
                break
            entries += entry
        return entries

    def releasedir(self, _: int, body: memoryview) -> bytes:
        self._listings.pop(struct.unpack_from("<Q", body)[0], None)
        return b""

    def fsyncdir(self, number: int, _: memoryview) -> bytes:
        self.nodes.sync_folder(number)
        return b""

    def statfs(self, _: int, __: memoryview) -> bytes:
        blocks = self.nodes.size // 4096
        free = max(0, blocks - self.nodes.used // 4096)
        return struct.pack("<5Q4I24x", blocks, free, free, 1 << 20, 1 << 20, 4096, 255, 4096, 0)

    def _entry(self, node: Node) -> bytes:
        return struct.pack("<QQQQII", self.epoch << EPOCH | node.number, 0, 0, 0, 0, 0) + _attributes(node)


def _names(body: memoryview) -> list[bytes]:
    return bytes(body).rstrip(b"\0").split(b"\0")


def _attributes(node: Node) -> bytes:
    size, (used, used_ns), (changed, changed_ns) = (
        len(node.content),
        divmod(node.used, 10**9),
        divmod(node.changed, 10**9),
    )
    times = (used, changed, changed, used_ns, changed_ns, changed_ns)
    links = node.links + node.is_folder
    return _ATTR.pack(
        node.number, size, -(-size // 4096) * 8, *times, node.mode, links, os.getuid(), os.getgid(), 0, 4096, 0
    )
