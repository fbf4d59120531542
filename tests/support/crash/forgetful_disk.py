"""A disk whose power fails when a test says so, mounted for the time of a block. Needs root and /dev/fuse."""

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.agent.mounts import may_mount
from tests.support.services.commands import wait_until

Way = Literal["forgotten", "any", "kept"]

needs_forgetful_disks = pytest.mark.skipif(
    not (may_mount() and os.access("/dev/fuse", os.R_OK | os.W_OK)), reason="needs root and /dev/fuse"
)


@dataclass(frozen=True)
class ForgetfulDisk:
    """The mount's folder, and what can be done to it. A step is a call that changes something or makes it durable."""

    place: Path
    _talk: socket.socket

    @property
    def step(self) -> int:
        """How many steps there were."""
        return int(self._tell("look")["step"])

    @property
    def is_dark(self) -> bool:
        """Whether the power has failed: every call answers EIO."""
        return bool(self._tell("look")["dark"])

    @property
    def faults_met(self) -> int:
        """How often the faults that stand now were met."""
        return int(self._tell("look")["met"])

    def sizes(self, folder: str) -> dict[str, int]:
        """Of all files below a folder of the disk, by path, without a call to the file system for each."""
        return dict(self._tell("sizes", folder=folder)["sizes"])

    def trail(self, count: int) -> str:
        """The last steps, for the message of a test that fails."""
        return "\n".join(self._tell("look", trail=count)["trail"])

    def fail_at(self, step: int, victims: Sequence[int]) -> None:
        """Before that many steps from now, these processes are killed and the power fails; 0 is never."""
        self._tell("fail at", step=step or -1, victims=list(victims), dark=True)

    def kill_at(self, step: int, victims: Sequence[int]) -> None:
        """Before that many steps from now, these processes are killed, and the disk goes on."""
        self._tell("fail at", step=step, victims=list(victims), dark=False)

    def lose_power(self, way: Way, seed: int = 0) -> None:
        """Lose what was not synced: all of it, any part of it, or nothing; and have power again."""
        self._tell("power loss", way=way, seed=seed)

    def refuse(self, kind: str, path: str = "*", *, number: int = errno.EIO, times: int = -1) -> None:
        """Steps of this kind, or lookups, at paths like this one fail, so often."""
        self._fault(kind, path, number, times, 0)

    def shorten(self, path: str, *, size: int) -> None:
        """Writes to paths like this one take that many bytes at most."""
        self._fault("write", path, 0, -1, size)

    def mend(self) -> None:
        """No more faults."""
        self._tell("mend")

    def _fault(self, kind: str, path: str, number: int, times: int, short: int) -> None:
        fault = {"kind": kind, "path": path, "number": number, "times": times, "short": short, "met": 0}
        self._tell("fault", fault=fault)

    def _tell(self, do: str, **given: Any) -> Any:
        self._talk.sendall(json.dumps({"do": do, **given}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            more = self._talk.recv(65536)
            assert more, "the file system has ended"
            answer += more
        return json.loads(answer)


@contextmanager
def forgetful_disk(root: Path) -> Iterator[ForgetfulDisk]:
    """A disk at ``root/disk``, empty."""
    place, address = root / "disk", root / "disk.sock"
    place.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash.forgetful_program", str(place), str(address)]
    )
    try:
        with socket.socket(socket.AF_UNIX) as talk:
            wait_until(lambda: process.poll() is not None or _connects(talk, address), what="the file system")
            talk.settimeout(60)
            yield ForgetfulDisk(place, talk)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
        process.wait(30)


def _connects(talk: socket.socket, address: Path) -> bool:
    try:
        talk.connect(str(address))
    except OSError:
        return False
    return True
