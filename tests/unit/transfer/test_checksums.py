"""The checksums that upstreams offer, against values that other programs computed."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.transfer.checksums import RunningChecksum
from tests.support.content.naive_crc import naive_crc
from tests.support.network.hypothesis import BRIEFLY

HELLO = b"hello\n"
KNOWN = [
    # sha256sum, git hash-object, md5sum
    (ChecksumKind.SHA256, HELLO, "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"),
    (ChecksumKind.GIT_BLOB, HELLO, "ce013625030ba8dba906f756967f9e9ca394464a"),
    (ChecksumKind.MD5, HELLO, "b1946ac92492d2347c6235b4d2611184"),
    (ChecksumKind.SHA256, b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
    (ChecksumKind.GIT_BLOB, b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
    (ChecksumKind.MD5, b"", "d41d8cd98f00b204e9800998ecf8427e"),
    (ChecksumKind.SHA1, HELLO, "f572d396fae9206628714fb2ce00f72e94f2258f"),  # sha1sum
    (ChecksumKind.SHA1, b"", "da39a3ee5e6b4b0d3255bfef95601890afd80709"),
    # the check values of the catalogue of parametrised CRC algorithms (reveng)
    (ChecksumKind.CRC32, b"123456789", "cbf43926"),
    (ChecksumKind.CRC32C, b"123456789", "e3069283"),
    (ChecksumKind.CRC64NVME, b"123456789", "ae8b14860a799888"),
    (ChecksumKind.CRC32, b"", "00000000"),
    (ChecksumKind.CRC32C, b"", "00000000"),
    (ChecksumKind.CRC64NVME, b"", "0000000000000000"),
]
EACH = pytest.mark.parametrize(("kind", "content", "known"), KNOWN)


def test_there_is_a_known_value_for_every_kind() -> None:
    assert {kind for kind, _, _ in KNOWN} == set(ChecksumKind)


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
        ChecksumKind.SHA1: hashlib.sha1(content, usedforsecurity=False),
        ChecksumKind.GIT_BLOB: hashlib.sha1(b"blob %d\0%s" % (len(content), content), usedforsecurity=False),
    }
    expected = {kind: hasher.hexdigest() for kind, hasher in known.items()}
    expected |= {kind: naive_crc(kind, content) for kind in ChecksumKind if kind.is_combinable}
    assert set(expected) == set(ChecksumKind)
    for kind, value in expected.items():
        running = RunningChecksum(Checksum(kind, value), len(content))
        for piece in pieces:
            running.update(bytearray(piece))
        running.check("file")
