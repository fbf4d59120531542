"""A kernel, or a sandbox, that refuses one system call: a seccomp filter of this process and all that it starts."""

import ctypes
import os
import struct
from typing import Final

_NUMBERS: Final = {  # of x86_64
    "sendfile": 40,
    "listxattr": 194,
    "flistxattr": 196,
    "fadvise64": 221,
    "ioprio_set": 251,
    "fallocate": 285,
    "syncfs": 306,
    "renameat2": 316,
    "copy_file_range": 326,
    "statx": 332,
}
CALLS: Final = tuple(_NUMBERS)
IS_KNOWN_MACHINE: Final = os.uname().machine == "x86_64"
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(call: str, error: int) -> None:
    """From now on this call fails with this error, for ever. Only in a fork. Raises ``OSError``: filters are not permitted."""
    steps = (
        (_LOAD_NUMBER, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, _NUMBERS[call]),
        (_RETURN, 0, 0, _ERRNO | error),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
