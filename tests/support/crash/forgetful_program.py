"""The process of a forgetful file system: the kernel's requests on one side, a test's commands on the other.

``python -m tests.support.crash.forgetful_program PLACE SOCKET`` mounts it, and serves until it is told to end.
"""

import ctypes
import errno
import fnmatch
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.support.crash.forgetful_calls import CALLS, EPOCH, Calls
from tests.support.crash.forgetful_nodes import Nodes, Refused

_INIT: Final = 26
_SILENT: Final = frozenset({2, 36, 42})  # FORGET, INTERRUPT, BATCH_FORGET: nobody waits for an answer
_LOST: Final = frozenset({"release", "flush", "releasedir"})  # of what was open before a power loss: no error
_FLAGS: Final = 1 | 1 << 5 | 1 << 22  # ASYNC_READ, BIG_WRITES, MAX_PAGES
_PAGES: Final = 256
_STEP: Final = frozenset(
    [
        "setattr",
        "symlink",
        "mkdir",
        "unlink",
        "rmdir",
        "rename",
        "link",
        "write",
        "fsync",
        "fsyncdir",
        "create",
        "fallocate",
    ]
)  # change something, or make it durable: these are counted, and faults can be scripted for them, and for look-ups


class Program:
    """Serves one mount. ``step`` counts the calls of ``_STEP``; the power fails before the one that a test names."""

    def __init__(self, place: Path, device: int) -> None:
        self.calls = Calls(Nodes())
        self.step = 0
        self._place, self._device = place, device
        self._fails_at = self._is_dark = 0
        self._victims: list[int] = []
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
            self._is_dark = 1
            for victim in self._victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            raise Refused(errno.EIO)
        return self._meet(kind, number, path, body)

    def _meet(self, kind: str, number: int, path: str, body: memoryview) -> memoryview:
        """What the faults that stand now make of a call: refused, shortened, or as it is."""
        for fault in self._faults:
            if fault["kind"] == kind and fnmatch.fnmatch(path, fault["path"]):
                body = self._fail(fault, number, body)
        return body

    def _fail(self, fault: dict[str, Any], number: int, body: memoryview) -> memoryview:
        if fault["skip"] > 0:
            fault["skip"] -= 1
            return body
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
        elif kind == "power loss":
            if command["way"] == "kept":
                nodes.sync_all()
            nodes.forget(Random(command["seed"]) if command["way"] == "any" else None)
            self.calls.epoch += 1
            self._is_dark = self._fails_at = 0
            self._faults = []
        elif kind == "sync":
            nodes.sync_all()
        elif kind == "fault":
            self._faults.append(command["fault"])
        elif kind == "mend":
            self._faults = []
        elif kind == "size":
            nodes.size = command["size"]
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
