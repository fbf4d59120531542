"""Whole-file checksums that an upstream offers, over bytes that come in order."""

from __future__ import annotations

import hashlib
from typing import Protocol

from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import Buffer
from bdn.core.upstream import Checksum, ChecksumKind


class _Hasher(Protocol):
    def update(self, content: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...


class RunningChecksum:
    """Takes a file's bytes from the first to the last, then says whether they are the right ones."""

    def __init__(self, expected: Checksum, size: int) -> None:
        self._expected = expected
        match expected.kind:
            case ChecksumKind.SHA256:
                self._hasher: _Hasher = hashlib.sha256()
            case ChecksumKind.GIT_BLOB:
                self._hasher = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
            case ChecksumKind.MD5:
                self._hasher = hashlib.md5(usedforsecurity=False)

    def update(self, content: Buffer) -> None:
        """The next bytes. Releases the GIL for large ones."""
        self._hasher.update(content)

    def check(self, subject: str) -> None:
        """All bytes were given: raise ``ChecksumMismatchError`` when they are not the file's."""
        actual = self._hasher.hexdigest()
        if actual != self._expected.hex:
            kind = self._expected.kind
            raise ChecksumMismatchError(subject, f"{kind}:{self._expected.hex}", f"{kind}:{actual}")
