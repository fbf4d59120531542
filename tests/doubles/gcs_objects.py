"""What a bucket of the GCS double holds: one live generation per name, in the order of names."""

import gzip
import hashlib
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import google_crc32c

_GENERATIONS = count(1_700_000_000_000_000)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """``content`` is as stored: compressed where ``encoding`` says so. ``composite`` ones have no MD5."""

    name: str
    content: bytes
    generation: int
    encoding: str | None = None
    composite: bool = False

    @property
    def hashes(self) -> dict[str, str]:
        crc32c, md5 = hashes_of(self.content)
        return {"crc32c": crc32c} if self.composite else {"crc32c": crc32c, "md5Hash": md5}

    def resource(self, bucket: str) -> dict[str, object]:
        """The JSON API's description."""
        encoding = {"contentEncoding": self.encoding} if self.encoding else {}
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(self.content)),
            "etag": f"C{self.generation}=",
            **self.hashes,
            **encoding,
        }

    @property
    def unpacked(self) -> bytes:
        return gzip.decompress(self.content) if self.encoding == "gzip" else self.content


@lru_cache(maxsize=4096)
def hashes_of(content: bytes) -> tuple[str, str]:
    crc32c = google_crc32c.value(content).to_bytes(4, "big")
    md5 = hashlib.md5(content, usedforsecurity=False).digest()
    return b64encode(crc32c).decode(), b64encode(md5).decode()


class GcsBucket:
    """A bucket that a test fills behind the server's back. ``readers`` None is everybody."""

    def __init__(self, name: str, readers: frozenset[str] | None) -> None:
        self.name = name
        self.readers = readers
        self._objects: dict[str, StoredObject] = {}
        self._names: list[tuple[bytes, str]] | None = []  # sorted; None until somebody asks

    def put(self, objects: Mapping[str, bytes], *, encoding: str | None = None, composite: bool = False) -> None:
        """Any name is taken as it is. Each object becomes a new generation."""
        for name, content in objects.items():
            self._objects[name] = StoredObject(name, content, next(_GENERATIONS), encoding, composite)
        self._names = None

    def delete(self, *names: str) -> None:
        for name in names:
            del self._objects[name]
        self._names = None

    def get(self, name: str) -> StoredObject | None:
        return self._objects.get(name)

    def after(self, prefix: str, last: str | None) -> Iterator[StoredObject]:
        """Objects whose names begin with ``prefix`` and lie behind ``last``, in the order of their UTF-8 bytes."""
        if self._names is None:
            self._names = sorted((name.encode("utf-8", "surrogatepass"), name) for name in self._objects)
        beginning = prefix.encode("utf-8", "surrogatepass")
        start = beginning if last is None else max(beginning, last.encode("utf-8", "surrogatepass") + b"\0")
        names = self._names
        for index in range(bisect_left(names, (start, "")), len(names)):
            if not names[index][0].startswith(beginning):
                return
            yield self._objects[names[index][1]]
