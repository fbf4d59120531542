"""Compact maps from digests to numbers: an agent holds a hundred thousand chunks per TiB.

A dictionary's entry, a digest and an integer take 300 bytes together. Here a digest takes 32 bytes, and its number
``width`` more.
"""

from collections.abc import Iterator, MutableMapping
from typing import Final

from bdn.core.chunk import Digest

_NAME: Final = 32  # bytes of a digest
_FULL: Final = 64  # average records per bucket


class DigestTable(MutableMapping[Digest, int]):
    """A hash table of buckets. A bucket is one ``bytes`` of concatenated records, searched by ``find``.

    Numbers are below 256 ** ``width``; with width 0 it is a set, and all numbers are 0. Other threads may read while
    one thread writes, because buckets are replaced and never changed.
    """

    __slots__ = ("_buckets", "_count", "_width")

    def __init__(self, width: int = 0) -> None:
        self._width = width
        self._buckets = [b""]
        self._count = 0

    def __getitem__(self, digest: Digest) -> int:
        name = digest.to_bytes()
        buckets = self._buckets
        bucket = buckets[_hash(name) & (len(buckets) - 1)]
        at = self._find(bucket, name)
        if at < 0:
            raise KeyError(digest)
        return int.from_bytes(bucket[at + _NAME : at + _NAME + self._width], "little")

    def __setitem__(self, digest: Digest, number: int) -> None:
        name = digest.to_bytes()
        record = name + number.to_bytes(self._width, "little")
        place = _hash(name) & (len(self._buckets) - 1)
        bucket = self._buckets[place]
        at = self._find(bucket, name)
        if at >= 0:
            self._buckets[place] = bucket[:at] + record + bucket[at + len(record) :]
            return
        self._buckets[place] = bucket + record
        self._count += 1
        if self._count > _FULL * len(self._buckets):
            self._grow()

    def __delitem__(self, digest: Digest) -> None:
        name = digest.to_bytes()
        place = _hash(name) & (len(self._buckets) - 1)
        bucket = self._buckets[place]
        at = self._find(bucket, name)
        if at < 0:
            raise KeyError(digest)
        self._buckets[place] = bucket[:at] + bucket[at + _NAME + self._width :]
        self._count -= 1

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, Digest) and self.get(digest) is not None

    def __iter__(self) -> Iterator[Digest]:
        for bucket in self._buckets:
            for record in self._records(bucket):
                yield Digest.from_bytes(record[:_NAME])

    def __len__(self) -> int:
        return self._count

    def _find(self, bucket: bytes, name: bytes) -> int:
        """Offset of the record, or less than 0. The digest's bytes may also occur across two records by chance."""
        at = bucket.find(name)
        while at > 0 and at % (_NAME + self._width):
            at = bucket.find(name, at + 1)
        return at

    def _grow(self) -> None:
        old = self._buckets
        buckets = [b""] * (2 * len(old))
        for place, bucket in enumerate(old):
            stays: list[bytes] = []
            goes: list[bytes] = []
            for record in self._records(bucket):
                (goes if _hash(record[:_NAME]) & len(old) else stays).append(record)
            buckets[place], buckets[place + len(old)] = b"".join(stays), b"".join(goes)
        self._buckets = buckets

    def _records(self, bucket: bytes) -> Iterator[bytes]:
        step = _NAME + self._width
        return (bucket[at : at + step] for at in range(0, len(bucket), step))


def _hash(name: bytes) -> int:
    """Salted per process: an attacker must not be able to choose contents that fill one bucket."""
    return hash(name)
