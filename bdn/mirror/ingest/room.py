"""Checks disk space before a source's first byte: for the store, and for what a program that embeds the mirror writes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bdn.core.chunk import EMPTY, Digest
from bdn.core.room import Need, Tree, check_room
from bdn.core.store import MirrorStore
from bdn.mirror.ingest.survey import Survey

Beside = Callable[[Need | None, Tree], Awaitable[Sequence[Need]]]


class RoomForSources:
    """``beside`` returns what else is written for a tree, and where, given what the store needs."""

    def __init__(self, store: MirrorStore) -> None:
        self._store = store
        self.beside: Beside | None = None

    async def check(self, source: str, survey: Survey) -> None:
        """Check before the first byte, if any is missing. Raises ``NoRoomError`` with the figures."""
        if survey.bytes_missing:
            check_room(source, await self.needs(survey))

    async def needs(self, survey: Survey) -> list[Need]:
        """What the source needs on this machine, the store first, unless it is a bucket."""
        disk = await asyncio.to_thread(self._store.disk)
        need = Need("the store", disk.path, disk.device, survey.bytes_missing, disk.free) if disk else None
        needs = [need] if need else []
        if self.beside is None:
            return needs
        _, tree = await self.look(survey)
        return [*needs, *await self.beside(need, tree)]

    async def look(self, survey: Survey) -> tuple[dict[str, Digest | None], Tree]:
        """The content of each path, as far as the store knows it, and the sizes."""
        return await asyncio.to_thread(_look, survey)


def _look(survey: Survey) -> tuple[dict[str, Digest | None], Tree]:
    found: dict[str, Digest | None] = {file.path: EMPTY for file in survey.files if not file.size}
    sizes: dict[Digest, int] = {EMPTY: 0} if found else {}
    for file, digest in survey.contents():
        found[file.path] = digest
        if digest is not None:
            sizes[digest] = file.size
    unknown = sum(map(survey.bytes_fetched_of, survey.missing()))
    return found, Tree(survey.bytes_total, sizes, unknown)
