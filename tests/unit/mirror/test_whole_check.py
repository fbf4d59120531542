"""Whatever the order in which chunks come, the checksum of the whole is the right one, and nothing is hashed twice."""

import hashlib
import itertools
import threading
import zlib
from collections.abc import Sequence

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.core.errors import ChecksumMismatchError
from bdn.core.source.upstream import Checksum, ChecksumKind
from bdn.mirror.ingest import copier as module
from bdn.mirror.ingest.copier import WholeCheck, whole_check

CONTENT = b"".join(bytes([n]) * CHUNK_SIZE for n in range(2)) + b"tail" * 25
CHUNKS = [CONTENT[start : start + CHUNK_SIZE] for start in range(0, len(CONTENT), CHUNK_SIZE)]
NAMES = [digest_of(chunk) for chunk in CHUNKS]
BY_NAME = dict(zip(NAMES, CHUNKS, strict=True))
RIGHT = {ChecksumKind.SHA1: hashlib.sha1(CONTENT).hexdigest(), ChecksumKind.CRC32: f"{zlib.crc32(CONTENT):08x}"}
ORDERS = [
    (order, stored)
    for stored in ((), (0,), (1,), (0, 1), (2,), (0, 1, 2))
    for order in itertools.permutations(index for index in range(3) if index not in stored)
]


class ReadBack:
    def __init__(self) -> None:
        self.read: list[Digest] = []

    def __call__(self, digest: Digest, buffer: memoryview) -> None:
        self.read.append(digest)
        buffer[:] = BY_NAME[digest]


def bring(check: WholeCheck, order: Sequence[int]) -> None:
    for index in order:
        buffer = bytearray(CHUNKS[index])
        check.take(index, NAMES[index], memoryview(buffer))


def finish(check: WholeCheck, read_back: ReadBack) -> None:
    for index in check.left():
        read_back.read.append(NAMES[index])
        check.take_back(index, bytearray(CHUNKS[index]))
    check.check("file")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 0.0)


@pytest.mark.parametrize(("order", "stored"), ORDERS)
@pytest.mark.parametrize("kind", list(RIGHT))
def test_every_order_gives_the_checksum_of_the_whole(
    kind: ChecksumKind, order: tuple[int, ...], stored: tuple[int, ...]
) -> None:
    for digits, is_right in ((RIGHT[kind], True), ("0" * len(RIGHT[kind]), False)):
        read_back = ReadBack()
        check = whole_check(Checksum(kind, digits), len(CONTENT), {index: NAMES[index] for index in stored}, read_back)
        bring(check, order)
        if is_right:
            finish(check, read_back)
        else:
            with pytest.raises(ChecksumMismatchError):
                finish(check, read_back)
        assert len(read_back.read) == len(set(read_back.read))
        if kind.is_combinable:
            assert set(read_back.read) == {NAMES[index] for index in stored}


def test_chunks_in_order_are_never_read_back() -> None:
    read_back = ReadBack()
    check = whole_check(Checksum(ChecksumKind.SHA1, RIGHT[ChecksumKind.SHA1]), len(CONTENT), {}, read_back)
    bring(check, range(3))
    finish(check, read_back)
    assert read_back.read == []


def test_a_chunk_that_comes_a_little_early_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 30.0)
    read_back = ReadBack()
    check = whole_check(Checksum(ChecksumKind.SHA1, RIGHT[ChecksumKind.SHA1]), len(CONTENT), {}, read_back)
    early = [threading.Thread(target=bring, args=(check, [index])) for index in (2, 1)]
    for thread in early:
        thread.start()
    bring(check, [0])
    for thread in early:
        thread.join(30)
    finish(check, read_back)
    assert read_back.read == []


def test_who_waits_for_a_turn_is_sent_home_when_nobody_wants_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 60.0)
    check = whole_check(Checksum(ChecksumKind.SHA1, RIGHT[ChecksumKind.SHA1]), len(CONTENT), {}, ReadBack())
    waiting = threading.Thread(target=bring, args=(check, [2]))
    waiting.start()
    check.stop()
    waiting.join(30)
    assert not waiting.is_alive()


def test_of_chunks_out_of_order_only_the_one_that_came_too_early_is_read_back() -> None:
    read_back = ReadBack()
    check = whole_check(Checksum(ChecksumKind.SHA1, RIGHT[ChecksumKind.SHA1]), len(CONTENT), {}, read_back)
    bring(check, (1, 0, 2))
    finish(check, read_back)
    assert read_back.read == [NAMES[1]]
