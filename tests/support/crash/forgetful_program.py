"""The process of a forgetful file system: the kernel's requests on one side, a test's commands on the other.

What the kernel asks for (include/uapi/linux/fuse.h, version 7.31) is answered from ``Nodes``.

``python -m tests.support.crash.forgetful_program PLACE SOCKET`` mounts it, and serves until it is told to end.
"""

import ctypes
import errno
import fnmatch
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.support.crash.forgetful_nodes import ROOT, Node, Nodes, Refused

_INIT: Final = 26
_SILENT: Final = frozenset({2, 36, 42})  # FORGET, INTERRUPT, BATCH_FORGET: nobody waits for an answer
_LOST: Final = frozenset({"release", "flush", "releasedir"})  # of what was open before a power loss: no error
_FLAGS: Final = 1 | 1 << 5 | 1 << 22  # ASYNC_READ, BIG_WRITES, MAX_PAGES
_PAGES: Final = 256
# Change something, or make it durable: these are counted, and faults can be scripted for them, and for look-ups.
_STEP: Final = (
    *("setattr", "symlink", "mkdir", "unlink", "rmdir", "rename"),
    *("link", "write", "fsync", "fsyncdir", "create", "fallocate"),
)
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
        blocks = 1 << 28
        free = blocks - self.nodes.used // 4096
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


class Program:
    """Serves one mount. ``step`` counts the calls of ``_STEP``; the power fails before the one that a test names."""

    def __init__(self, place: Path, device: int) -> None:
        self.calls = Calls(Nodes())
        self.step = 0
        self._place, self._device = place, device
        self._fails_at = self._is_dark = 0
        self._victims: list[int] = []
        self._is_dark_then = True
        self._faults: list[dict[str, Any]] = []
        self._trail: list[str] = []
        self._buffer = memoryview(bytearray(_PAGES * 4096 + 65536))

    # --- the kernel ---

    def serve(self) -> None:
        """Answer one request."""
        try:
            size = os.readv(self._device, [self._buffer])
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return
            raise
        request = self._buffer[:size]
        _, opcode, unique, number = struct.unpack_from("<IIQQ", request)
        if opcode in _SILENT:
            return
        body, failure = b"", 0
        try:
            body = self._answer(opcode, number, request[40:])
        except Refused as refused:
            failure = refused.number
        with suppress(FileNotFoundError):  # whoever asked is gone
            os.writev(self._device, [struct.pack("<IiQ", 16 + len(body), -failure, unique), body])

    def _answer(self, opcode: int, number: int, body: memoryview) -> bytes:
        if opcode == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, _FLAGS, 16, 12, _PAGES * 4096, 1, _PAGES, 0, 0)
        if self._is_dark:
            raise Refused(errno.EIO)
        if opcode == 38:
            return b""
        kind = CALLS.get(opcode)
        if kind is None:
            raise Refused(errno.ENOSYS)
        if kind in _LOST and number >> EPOCH != self.calls.epoch:
            return b""
        node = self.calls.inside(number)
        answer = getattr(self.calls, kind)
        kind = kind.removesuffix("2")
        if kind in _STEP:
            body = self._count(kind, node, body)
        elif kind == "lookup" and self._faults:
            body = self._meet(kind, node, self._path(kind, node, body), body)
        return bytes(answer(node, body))

    def _count(self, kind: str, number: int, body: memoryview) -> memoryview:
        path = self._path(kind, number, body)
        self.step += 1
        self._trail.append(f"{self.step} {kind} {path}")
        if self.step == self._fails_at:
            self._is_dark = int(self._is_dark_then)
            for victim in self._victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            if self._is_dark:
                raise Refused(errno.EIO)
        return self._meet(kind, number, path, body)

    def _meet(self, kind: str, number: int, path: str, body: memoryview) -> memoryview:
        """What the faults that stand now make of a call: refused, shortened, or as it is."""
        for fault in self._faults:
            if fault["kind"] == kind and fnmatch.fnmatch(path, fault["path"]):
                body = self._fail(fault, number, body)
        return body

    def _fail(self, fault: dict[str, Any], number: int, body: memoryview) -> memoryview:
        if fault["times"] == 0:
            return body
        fault["times"] -= 1
        fault["met"] += 1
        if fault["short"]:
            handle, offset, size = struct.unpack_from("<QQI", body)
            cut = bytearray(body)
            struct.pack_into("<QQI", cut, 0, handle, offset, min(size, fault["short"]))
            return memoryview(cut)
        if fault["kind"] == "fsync":
            self.calls.nodes[number].lose_pages()
        raise Refused(fault["number"])

    def _path(self, kind: str, number: int, body: memoryview) -> str:
        nodes = self.calls.nodes
        path = nodes.path(nodes[number])
        skipped = {"mkdir": 8, "create": 16, "link": 8, "unlink": 0, "rmdir": 0, "symlink": 0, "lookup": 0}.get(kind)
        if skipped is None:
            return path
        name = bytes(body[skipped:]).split(b"\0")[0].decode(errors="surrogateescape")
        return f"{path}/{name}" if path else name

    # --- a test ---

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a test asks; see ``ForgetfulDisk``."""
        nodes, kind = self.calls.nodes, command["do"]
        if kind == "fail at":
            self._fails_at, self._victims = self.step + command["step"], command["victims"]
            self._is_dark_then = command["dark"]
        elif kind == "power loss":
            if command["way"] == "kept":
                nodes.sync_all()
            nodes.forget(Random(command["seed"]) if command["way"] == "any" else None)
            self.calls.epoch += 1
            self._is_dark = self._fails_at = 0
            self._faults = []
        elif kind == "fault":
            self._faults.append(command["fault"])
        elif kind == "mend":
            self._faults = []
        elif kind == "sizes":
            return {"sizes": nodes.sizes(command["folder"])}
        trail = self._trail[-command.get("trail", 0) :] if command.get("trail") else []
        return {
            "step": self.step,
            "dark": bool(self._is_dark),
            "met": sum(one["met"] for one in self._faults),
            "trail": trail,
        }


def main() -> None:
    place, address = Path(sys.argv[1]), sys.argv[2]
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"forgetful", os.fsencode(place), b"fuse.forgetful", 6, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))
    program = Program(place, device)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        talk, _ = listening.accept()
        with talk, talk.makefile("rwb") as lines:
            while True:
                waiting: tuple[int, int] = (device, talk.fileno())
                for ready in select.select(waiting, (), ())[0]:
                    if ready == device:
                        program.serve()
                        continue
                    line = lines.readline()
                    if not line:
                        return
                    lines.write(json.dumps(program.obey(json.loads(line))).encode() + b"\n")
                    lines.flush()


if __name__ == "__main__":
    main()
