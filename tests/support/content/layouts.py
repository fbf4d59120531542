"""Files cut into chunks, small ones packed, and the documents of manifests, by a few lines of their own."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter

from bdn.core.chunk import CHUNK_SIZE, Digest, FileEntry, FileLayout, Slice, digest_of
from bdn.core.layout import Manifest
from bdn.core.manifest import ManifestWriter, PlacedFile, Root
from node_agent.cache.records import Held
from tests.support.content.noise import SHARED


def pieces(content: bytes) -> tuple[bytes, ...]:
    """Those of contents that modules share are shared, too."""
    return _shared(content) if len(content) in SHARED else _cut(content)


def _cut(content: bytes) -> tuple[bytes, ...]:
    return tuple(content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE))


_shared = lru_cache(maxsize=len(SHARED))(_cut)


def whole(content: bytes) -> FileLayout:
    """A file in chunks of its own."""
    return FileLayout.of(len(content), tuple(map(digest_of, pieces(content))))


def pack(files: Iterable[bytes], slab_size: int = CHUNK_SIZE) -> Iterator[tuple[Digest, bytes, list[FileLayout]]]:
    """Slabs with their bytes and their files' layouts; in the order given, each slab filled as far as it goes."""
    together: list[bytes] = []
    for content in [*files, None]:
        if together and (content is None or sum(map(len, together)) + len(content) > slab_size):
            yield packed(together)
            together = []
        if content is not None:
            together.append(content)


def packed(files: list[bytes]) -> tuple[Digest, bytes, list[FileLayout]]:
    """These in one slab."""
    content, layouts, offset = b"".join(files), list[FileLayout](), 0
    slab = digest_of(content)
    for one in files:
        digest = digest_of(one)
        layouts.append(FileLayout(digest, len(one), (digest,), Slice(slab, len(content), offset)))
        offset += len(one)
    return slab, content, layouts


def held_of(files: Mapping[str, FileLayout]) -> Held:
    """The manifest of these files by path."""
    writer = ManifestWriter()
    documents = [document for path in sorted(files) for document in writer.add(PlacedFile(path, files[path]))]
    *pages, root = [*documents, *writer.finish()]
    return Held.of(Root.parse(root.content), tuple(page.content for page in pages))


def manifest_of(files: Iterable[FileEntry]) -> Manifest:
    """A manifest without documents. Equal files have one name."""
    ordered = tuple(sorted(files, key=attrgetter("path")))
    return Manifest(digest_of(repr(ordered).encode()), ordered)
