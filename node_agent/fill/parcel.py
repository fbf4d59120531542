"""What travels together: a file with chunks of its own, or the missing files of one slab."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from bdn.core.digest import Digest
from bdn.core.layout import FileLayout


@dataclass(frozen=True)
class Parcel:
    """Files that one fetch or one file's fetches bring, and where the mirror serves their chunks."""

    files: tuple[FileLayout, ...]
    base_url: str

    @property
    def digests(self) -> tuple[Digest, ...]:
        """The files' names."""
        return tuple(file.digest for file in self.files)

    def only(self, digests: Collection[Digest]) -> Parcel:
        """The same with these files alone."""
        wanted = frozenset(digests)
        return replace(self, files=tuple(file for file in self.files if file.digest in wanted))


def parcels_of(files: Iterable[tuple[FileLayout, str]]) -> list[Parcel]:
    """All files with their mirror's address, those of a slab together.

    The largest first, so that the last threads do not wait for one big file at the end.
    """
    # By size as well: a layout that contradicts itself about a slab fails for the files that it is wrong about.
    found: dict[tuple[Digest, int | None], list[tuple[FileLayout, str]]] = {}
    for file, base_url in files:
        lies = file.slice
        key = (lies.slab, lies.slab_size) if lies else (file.digest, None)
        found.setdefault(key, []).append((file, base_url))
    parcels = [Parcel(tuple(file for file, _ in together), together[0][1]) for together in found.values()]
    return sorted(parcels, key=lambda parcel: sum(file.size for file in parcel.files), reverse=True)
