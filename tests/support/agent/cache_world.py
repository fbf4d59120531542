"""A small world of manifests for a cache that is killed again and again: shared files, slabs, empty files, files of chunks."""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bdn.core.chunk import Digest, FileLayout, chunk_count, chunk_range, digest_of, file_digest
from node_agent.cache.records import Held
from tests.support.content.layouts import held_of, pack

CHUNK = 512  # bytes, for this process: a file of several chunks shall cost nothing
FOLDERS = 4  # of the 256 in which whole files stand: an agent looks into each when it starts


def shrink() -> None:
    """Let every module of this process believe that chunks are tiny and folders few. Not to be undone: for processes of their own.

    Pages of manifests keep their size: one file's entry is larger than a tiny chunk.
    """
    for name, module in list(sys.modules.items()):
        if getattr(module, "CHUNK_SIZE", None) == 8 * 1024 * 1024 and name != "bdn.core.manifest":
            module.CHUNK_SIZE = CHUNK  # type: ignore[attr-defined]
    sys.modules["node_agent.fill.part"].SYNC_CHUNKS = 2  # type: ignore[attr-defined]
    sys.modules["node_agent.disk.places"].range = lambda _: range(FOLDERS)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class World:
    """What may be staged, and the bytes of every chunk and slab."""

    manifests: dict[Digest, Held]
    files: dict[Digest, dict[str, bytes]]  # by manifest and path
    chunks: dict[Digest, bytes]

    @classmethod
    def of(cls, seed: int, count: int = 6) -> Self:
        chance = random.Random(seed)
        small = [_noise(chance, chance.choice([8, 40, 120, 300])) for _ in range(8)]
        large = [_noise(chance, chance.choice([CHUNK + 1, 2 * CHUNK, 4 * CHUNK + 77, 6 * CHUNK])) for _ in range(5)]
        world = cls({}, {}, {})
        for number in range(count):
            some = chance.sample(small, chance.randrange(1, 4)) + chance.sample(large, chance.randrange(3))
            files = {f"{'deep/' * (index % 2)}{index}.bin": content for index, content in enumerate(some)}
            world.add(files | {"name": _noise(chance, 9)}, is_packed=number % 2 == 0)
        return world

    def add(self, files: dict[str, bytes], *, is_packed: bool) -> None:
        layouts: dict[Digest, FileLayout] = {}
        if is_packed:
            tiny = dict.fromkeys(content for content in files.values() if 0 < len(content) <= CHUNK // 2)
            for slab, packed, inside in pack(tiny, slab_size=CHUNK):
                self.chunks[slab] = packed
                layouts |= {layout.digest: layout for layout in inside}
        held = held_of(
            {path: layouts.get(digest_of(content)) or self._plain(content) for path, content in files.items()}
        )
        self.manifests[held.root.digest] = held
        self.files[held.root.digest] = files

    def contents(self) -> dict[Digest, int]:
        """Every file's size by its digest."""
        return {digest: size for one in self.manifests.values() for digest, size in one.manifest.contents.items()}

    def sizes_of(self, manifest: Digest) -> Mapping[Digest, int]:
        """A manifest's contents."""
        return self.manifests[manifest].manifest.contents

    def _plain(self, content: bytes) -> FileLayout:
        pieces = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
        self.chunks.update((digest_of(piece), piece) for piece in pieces)
        return FileLayout.of(len(content), tuple(map(digest_of, pieces)))


def digest_of_bytes(content: bytes) -> Digest:
    """The digest of a file."""
    pieces = [chunk_range(len(content), index) for index in range(chunk_count(len(content)))]
    return file_digest(len(content), (digest_of(content[one.start : one.stop]) for one in pieces))


def _noise(chance: random.Random, size: int) -> bytes:
    """Bytes whose file stands in one of the first folders."""
    while True:
        content = chance.randbytes(size)
        if int(digest_of_bytes(content).hex[:2], 16) < FOLDERS:
            return content
