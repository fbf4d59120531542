"""Hostile bytes that replay: each is made from a seed's number alone, out of valid forms."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

DEEP: Final = tuple(
    opening * count + closing * count
    for count in (500, 30_000)
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"))
)
PIECES: Final = (
    b"9" * 5000, b"1e999", b"-1", b"NaN", b"Infinity", b"18446744073709551616", b"0.1", b"true", b"null", b'""', b"[]",
    b"{}", b"\\ud800", b"\\u0000", b"\x00", b"\xff\xfe", b"..", b"/../", b"%2e%2e%2f", b"\\", b"\r\n", b"\n", b"*" * 40,
    b"**/" * 20, b"a" * 70_000, b" ", b",", b'"', b":", b"\xe2\x80\xae", b"\xcc\x81", "İ".encode(), *DEEP,
)  # fmt: skip


def hostile(seeds: Sequence[bytes], number: int) -> bytes:
    """The input with this number: a valid form with some bytes flipped, cut, doubled, moved or put in."""
    random = Random(number)
    content = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        at = random.randrange(len(content) + 1)
        stop = min(len(content), at + random.choice((1, 2, 8, 64)))
        match random.randrange(6):
            case 0:
                content[at:stop] = bytes(random.randrange(256) for _ in range(stop - at))
            case 1:
                del content[at:stop]
            case 2:
                content[at:at] = content[at:stop] * random.choice((1, 3, 50))
            case 3:
                content[at:at] = random.choice(PIECES)
            case 4:
                content[at:stop] = random.choice(PIECES)
            case _:
                content[at:at] = random.choice(seeds)
    return bytes(content)


def all_of(seeds: Sequence[bytes], count: int) -> Iterator[bytes]:
    """The valid forms, each alone and deeply nested ones, then ``count`` hostile ones."""
    yield from seeds
    yield from PIECES
    for number in range(count):
        yield hostile(seeds, number)
