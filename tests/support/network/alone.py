"""A machine without a network, for one thread of this process and whatever it starts."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bdn.disk.durable import opened

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET: Final = 0x40000000  # unshare(2)
_SIOCSIFFLAGS: Final = 0x8914  # netdevice(7)
_IFF_UP: Final = 0x1


@contextmanager
def loopback_alone() -> Iterator[None]:
    """Until the block ends, this thread reaches loopback alone. Threads and processes that it starts stay there.

    All ports are free. Programs that are forked (``services.forked``) start in the network of the first one. Raises
    ``OSError`` without the right to make a network namespace.
    """
    with opened("/proc/thread-self/ns/net", os.O_RDONLY) as before:
        _check(_libc.unshare(_CLONE_NEWNET))
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
            yield
        finally:
            _check(_libc.setns(before, _CLONE_NEWNET))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
