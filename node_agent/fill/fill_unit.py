"""What is filled together: a file with chunks of its own, or the missing files of one slab."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from bdn.core.digest import Digest
from bdn.core.store.layout import FileLayout
from bdn.wire.operation_schema import Tier

Report = Callable[[Tier, int], None]  # bytes that are here now, and the tier that they came from
FileReport = Callable[[Digest, Tier, int], None]  # and of which file they are


@dataclass(frozen=True)
class FillUnit:
    """Files that one fetch or one file's fetches bring, the manifest for which they are fetched, and where it is served."""

    files: tuple[FileLayout, ...]
    manifest: Digest
    base_url: str

    @property
    def digests(self) -> tuple[Digest, ...]:
        """The files' names."""
        return tuple(file.digest for file in self.files)

    @property
    def chunks(self) -> tuple[Digest, ...]:
        """What is fetched."""
        lies = self.files[0].slice
        return (lies.slab,) if lies else self.files[0].chunks

    @property
    def size(self) -> int:
        """Bytes that are fetched."""
        lies = self.files[0].slice
        return lies.slab_size if lies else self.files[0].size

    def only(self, digests: Collection[Digest]) -> FillUnit:
        """The same with these files alone."""
        wanted = frozenset(digests)
        return replace(self, files=tuple(file for file in self.files if file.digest in wanted))


def units_of(files: Iterable[FileLayout], manifest: Digest, base_url: str) -> list[FillUnit]:
    """All files, those of a slab together.

    The largest first, so that the last threads do not wait for one big file at the end; then by name, so that all nodes come
    to the same order (``fetch.routing.chunks_in_order``).
    """
    # By size as well: a layout that contradicts itself about a slab fails for the files that it is wrong about.
    found: dict[tuple[int, str], list[FileLayout]] = {}
    for file in files:
        lies = file.slice
        found.setdefault((-lies.slab_size, lies.slab.hex) if lies else (-file.size, file.digest.hex), []).append(file)
    return [FillUnit(tuple(found[key]), manifest, base_url) for key in sorted(found)]
