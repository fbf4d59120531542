"""Whether a source fits, before its first byte is read: the store's disk, and what a program writes that embeds the mirror."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bdn.core.chunk import Digest
from bdn.core.room import Need, Tree, check_room
from bdn.core.store import MirrorStore
from bdn.mirror.db.database import Database
from bdn.mirror.ingest.survey import Survey, contents_by_path

Beside = Callable[[Need | None, Tree], Awaitable[Sequence[Need]]]


class RoomForSources:
    """Looks at the disks. ``beside`` says what else is written for a tree, and where, after what the store needs."""

    def __init__(self, store: MirrorStore, database: Database) -> None:
        self._store = store
        self._database = database
        self.beside: Beside | None = None

    async def check(self, source: str, survey: Survey) -> None:
        """Before the first byte, if there is one to come. Raises ``NoRoomError`` with the figures."""
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
        """What comes, as far as the store knows it: the content of each path, and how much it is."""
        async with self._database.read() as session:
            known = await contents_by_path(session, survey.files)
        sizes = {digest: size for size, digest in known.values() if digest is not None}
        unknown = sum(file.size for file in survey.missing())
        return {path: digest for path, (_, digest) in known.items()}, Tree(survey.bytes_total, sizes, unknown)
