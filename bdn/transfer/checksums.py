"""Whole-file checksums that an upstream offers, over bytes that come in order."""

from __future__ import annotations

import hashlib
from typing import Protocol

from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import Buffer
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.cyclic_checksums import CYCLIC, Cyclic


class _Hasher(Protocol):
    def update(self, content: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...


class _RunningCyclic:
    """A cyclic checksum with the methods of ``hashlib``."""

    def __init__(self, cyclic: Cyclic) -> None:
        self._cyclic = cyclic
        self._value = 0

    def update(self, content: Buffer, /) -> None:
        self._value = self._cyclic.go_on(content, self._value)

    def hexdigest(self) -> str:
        return self._cyclic.format(self._value)


class RunningChecksum:
    """Takes a file's bytes from the first to the last, then says whether they are the right ones."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._expected = expected
        self._hasher = _new_hasher(expected.kind, size)

    def update(self, content: Buffer) -> None:
        """The next bytes. Releases the GIL for large ones."""
        self._hasher.update(content)

    def check(self, subject: str) -> None:
        """All bytes were given: raise ``ChecksumMismatchError`` when they are not the file's."""
        check_equal(self._expected, self._hasher.hexdigest(), subject)


def check_equal(expected: Checksum, actual: str, subject: str) -> None:
    """Raise ``ChecksumMismatchError`` with both values when ``actual`` is another one."""
    if actual != expected.hex:
        raise ChecksumMismatchError(subject, f"{expected.kind}:{expected.hex}", f"{expected.kind}:{actual}")


def _new_hasher(kind: ChecksumKind, size: int) -> _Hasher:
    match kind:
        case ChecksumKind.SHA256:
            return hashlib.sha256()
        case ChecksumKind.SHA1:
            return hashlib.sha1(usedforsecurity=False)
        case ChecksumKind.GIT_BLOB:
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case ChecksumKind.MD5:
            return hashlib.md5(usedforsecurity=False)
        case ChecksumKind.CRC32 | ChecksumKind.CRC32C | ChecksumKind.CRC64NVME:
            return _RunningCyclic(CYCLIC[kind])
