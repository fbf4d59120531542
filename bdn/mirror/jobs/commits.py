"""What a commit describes: files, and the positions of their bytes in the chunks of the push. Blocking."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from bdn.core.chunk import (
    Digest,
    FileLayout,
    UnsafePathError,
    check_tree,
    digest_of,
    normalise_path,
)
from bdn.core.errors import InvalidRequestError, LimitExceededError
from bdn.core.manifest import PlacedFile, is_small, slab_layouts
from bdn.core.store import ChunkStore
from bdn.mirror.db import manifests
from bdn.wire.push_schema import PushedFile


def placed_files(files: Sequence[PushedFile], limit: int) -> list[PlacedFile]:
    """The files in path order. A slab contains consecutive files in that order, and nothing else.

    So a reader of the checkpoint may read every byte of its chunks. Raises ``LimitExceededError``,
    ``InvalidRequestError``.
    """
    if len(files) > limit:
        raise LimitExceededError("files of the push", len(files), limit)
    try:
        by_path = {normalise_path(file.path): file for file in files}
        if len(by_path) != len(files):
            raise UnsafePathError("a path is listed twice")
        check_tree(by_path)
        return sorted(_placed(sorted(by_path.items())), key=attrgetter("path"))
    except ValueError as error:  # includes UnsafePathError
        raise InvalidRequestError(f"files: {error}") from error


def _placed(files: Iterable[tuple[str, PushedFile]]) -> Iterable[PlacedFile]:
    slab: list[tuple[str, int, Digest]] = []
    name, size = "", 0
    for path, file in files:
        if not is_small(file.size):
            if file.slab or file.digest or file.offset is not None:
                raise ValueError(f"{path!a} of {file.size} bytes is too large for a slab: give its chunks")
            yield PlacedFile(path, FileLayout.of(file.size, tuple(map(Digest.parse, file.chunks))))
            continue
        if not file.slab or not file.digest or file.chunks:
            raise ValueError(f"{path!a} of {file.size} bytes has to be in a slab: give its digest, slab and offset")
        if file.offset == 0:
            yield from _in_slab(slab, name, size)
            slab, name, size = [], file.slab, 0
        if (file.slab, file.offset) != (name, size):
            raise ValueError(f"{path!a} does not follow the file before it in its slab")
        slab.append((path, file.size, Digest.parse(file.digest)))
        size += file.size
    yield from _in_slab(slab, name, size)


def _in_slab(files: Sequence[tuple[str, int, Digest]], name: str, size: int) -> Iterable[PlacedFile]:
    return slab_layouts(files, Digest.parse(name), size) if files else ()


def chunk_sizes(files: Iterable[PlacedFile]) -> dict[Digest, int]:
    """Every chunk of these files, with the size that the files imply. Raises ``InvalidRequestError``."""
    sizes: dict[Digest, int] = {}
    for file in files:
        layout = file.layout
        if layout.slice is not None:
            chunks = [(layout.slice.slab, layout.slice.slab_size)]
        else:
            chunks = [(chunk.digest, chunk.range.size) for chunk in layout.placed()]
        for digest, size in chunks:
            if sizes.setdefault(digest, size) != size:
                raise InvalidRequestError(f"chunk {digest} would have {size} bytes and {sizes[digest]}")
    return sizes


def slabs_of(files: Iterable[PlacedFile]) -> dict[Digest, set[tuple[int, int, Digest]]]:
    """Offset, size and digest of the files in each slab."""
    slabs: dict[Digest, set[tuple[int, int, Digest]]] = {}
    for file in files:
        if (lies := file.layout.slice) is not None:
            slabs.setdefault(lies.slab, set()).add((lies.offset, file.size, file.digest))
    return slabs


def check_slab(store: ChunkStore, slab: Digest, files: Iterable[tuple[int, int, Digest]]) -> None:
    """Verify the digests of the files in a slab. Raises ``InvalidRequestError``, ``DocumentDamagedError``."""
    content = memoryview(manifests.document(store, slab))
    for offset, size, digest in files:
        if digest_of(content[offset : offset + size]) != digest:
            raise InvalidRequestError(f"files: slab {slab} does not hold file {digest} at offset {offset}")
