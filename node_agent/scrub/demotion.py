"""A whole file that cannot be mended leaves ``files``, with as much of it kept as is right."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.store.layout import FileLayout
from bdn.disk.durable import disk_errors, sync_folder, write_durably
from node_agent.cache.quarantine import Quarantine
from node_agent.disk.places import Places
from node_agent.fill.part import Bitmap

_OURS: Final = 0o644  # a part is written to; whoever sees it in a view goes on reading


@dataclass(frozen=True)
class Demotion:
    """Both ways to take it away. Blocking; each says whether a part is left, and raises ``DiskFailedError``.

    Views that are hard links keep the file as it is: nothing is taken from under a job that runs.
    """

    places: Places
    quarantine: Quarantine

    def to_part(self, file: FileLayout, wrong: Collection[int]) -> bool:
        """The right bytes could not be had: its right chunks are a part, from which the next fill goes on.

        It is the same file, so that the views that show it heal with that fill. One without a right chunk is dropped: its
        bytes are evidence.
        """
        place, part = self.places.file(file.digest), self.places.part(file.digest)
        with disk_errors(place):
            right = [index for index in range(len(file.chunks)) if index not in wrong]
            if not right:
                place.unlink(missing_ok=True)
                return False
            bitmap = Bitmap(len(file.chunks))
            bitmap.add(right)
            write_durably(self.places.bitmap(file.digest), bitmap.to_bytes())  # without its part it is rubbish
            place.chmod(_OURS)
            place.rename(part)
            for folder in (part.parent, place.parent):
                sync_folder(folder)
        return True

    def to_quarantine(self, content: Digest) -> bool:
        """The disk does not keep what is written there: the file goes on occupying that place, and another one is filled."""
        place = self.places.file(content)
        with disk_errors(place):
            if place.exists():
                self.quarantine.take(place)
                sync_folder(place.parent)
        return False
