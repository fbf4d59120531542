"""Files cut into chunks by a few lines of their own."""

from bdn.core.chunk import CHUNK_SIZE


def pieces(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_SIZE] for start in range(0, len(content), CHUNK_SIZE)]
