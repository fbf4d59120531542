"""The checksums that upstreams offer, against values that other programs computed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import ChecksumMismatchError
from bdn.core.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import RunningChecksum
from tests.support.wire_hypothesis import BRIEFLY

HELLO = b"hello\n"
KNOWN = [
    # sha256sum, git hash-object, md5sum
    (ChecksumKind.SHA256, HELLO, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"),
    (ChecksumKind.GIT_BLOB, HELLO, "ce013625030ba8dba906f756967f9e9ca394464a"),
    (ChecksumKind.MD5, HELLO, "b1946ac92492d2347c6235b4d2611184"),
    (ChecksumKind.SHA256, b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (ChecksumKind.GIT_BLOB, b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
    (ChecksumKind.MD5, b"", "d41d8cd98f00b204e9800998ecf8427e"),
]
EACH = pytest.mark.parametrize(("kind", "content", "known"), KNOWN)


@EACH
def test_the_right_bytes_pass(kind: ChecksumKind, content: bytes, known: str) -> None:
    running = RunningChecksum(Checksum(kind, known), len(content))
    for at in range(len(content)):
        running.update(memoryview(content)[at : at + 1])
    running.check("file")


@EACH
def test_other_bytes_are_refused_with_both_values(kind: ChecksumKind, content: bytes, known: str) -> None:
    running = RunningChecksum(Checksum(kind, known), len(content))
    running.update(memoryview(b"other"))
    with pytest.raises(
        ChecksumMismatchError, match=f"a/file has the wrong content: expected {kind}:{known}, got {kind}:"
    ):
        running.check("a/file")


@EACH
def test_missing_or_additional_bytes_are_refused(kind: ChecksumKind, content: bytes, known: str) -> None:
    for wrong in (content + b"\0", content[:-1] if content else b"\n"):
        running = RunningChecksum(Checksum(kind, known), len(content))
        running.update(memoryview(wrong))
        with pytest.raises(ChecksumMismatchError):
            running.check("file")


def test_a_git_blob_is_named_with_its_size() -> None:
    running = RunningChecksum(
        Checksum(ChecksumKind.GIT_BLOB, "ce013625030ba8dba906f756967f9e9ca394464a"), len(HELLO) + 1
    )
    running.update(memoryview(HELLO))
    with pytest.raises(ChecksumMismatchError):
        running.check("file")


@BRIEFLY
@given(pieces=st.lists(st.binary(max_size=50), max_size=8))
def test_it_does_not_matter_in_which_pieces_the_bytes_come(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    known = {
        ChecksumKind.SHA256: hashlib.sha256(content),
        ChecksumKind.MD5: hashlib.md5(content, usedforsecurity=False),
        ChecksumKind.GIT_BLOB: hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False),
    }
    for kind, expected in known.items():
        running = RunningChecksum(Checksum(kind, expected.hexdigest()), len(content))
        for piece in pieces:
            running.update(bytearray(piece))
        running.check("file")
