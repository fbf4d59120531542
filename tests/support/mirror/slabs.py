"""Files cut into chunks, and small ones packed, by a few lines of their own."""

from collections.abc import Iterable, Iterator

from bdn.core.chunk import CHUNK_SIZE, FileLayout, Slab, digest_of


def pieces(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]


def whole(content: bytes) -> FileLayout:
    """A file in chunks of its own."""
    return FileLayout.of(len(content), tuple(map(digest_of, pieces(content))))


def pack(
    files: Iterable[bytes], scope: str = "public", slab_size: int = CHUNK_SIZE, seal: bytes = b""
) -> Iterator[tuple[Slab, bytes, list[FileLayout]]]:
    """Slabs with their bytes and their files' layouts; in the order given, each slab filled as far as it goes."""
    together: list[bytes] = []
    for content in [*files, None]:
        if together and (content is None or sum(map(len, together)) + len(content) > slab_size):
            packed = b"".join(together) + seal
            slab = Slab(digest_of(packed), len(packed), scope)
            offsets = [sum(map(len, together[:index])) for index in range(len(together))]
            yield (
                slab,
                packed,
                [
                    FileLayout.packed(digest_of(one), len(one), slab, offset)
                    for one, offset in zip(together, offsets, strict=True)
                ],
            )
            together = []
        if content is not None:
            together.append(content)
