"""The control API's unix socket: whose it is, who may connect, and what a dead agent left behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bdn.core.errors import InUseError, InvalidRequestError
from bdn.disk.durable import disk_errors

_LONGEST_PATH: Final = 107  # bytes; unix(7)


@contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at ``path``, for the owner and the group; the file goes with the context.

    A socket that a dead agent left is replaced; one that somebody answers at is not.

    Raises:
        InUseError: an agent is alive there.
        InvalidRequestError: the path is longer than the kernel allows.
    """
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidRequestError(
            f"BDN_AGENT_SOCKET: {path} is longer than the {_LONGEST_PATH} bytes a socket may have"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        os.fchmod(listener.fileno(), 0o660)  # before bind: the file is never open to more than these
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket():
                _check_dead(path)
                path.unlink()
            listener.bind(str(path))
            path.chmod(0o660)  # the umask took some of it away
            inode = path.stat().st_ino
        try:
            listener.listen(128)
            yield listener
        finally:
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()


def _check_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
    raise InUseError(f"socket {path}", ("another agent",))
