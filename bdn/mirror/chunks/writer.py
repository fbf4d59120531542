"""How chunks get into the store: a row and a reference, then the bytes, then the mark that they are stored."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import Buffer, Digest
from bdn.core.errors import BdnError
from bdn.core.manifest import ManifestWriter, PlacedFile, Root
from bdn.core.store import ChunkStore
from bdn.mirror.db import chunks, damaged
from bdn.mirror.db.chunks import ChunkIsLeavingError, SetEndedError
from bdn.mirror.db.database import Database, batches
from bdn.mirror.db.waiting import answer_of
from bdn.transfer.batching import Batched

_AT_ONCE: Final = 500  # chunks of one transaction
_HELD_AT_ONCE: Final = 2000  # likewise
_LOOK_AGAIN_SECONDS: Final = 0.5  # between polls of a chunk that is leaving
_LEAVING_SECONDS: Final = 60.0  # after which ``put`` fails with ``ChunkIsLeavingError``


@dataclass(eq=False)
class SetWriter:
    """Puts chunks into the store for one set. Its requests to the store count for ``organisation``."""

    database: Database
    store: ChunkStore
    set_id: int
    organisation: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _durable: set[Digest] = field(default_factory=set)  # not yet recorded as stored
    _settling: asyncio.Future[None] | None = None
    _recorded: Batched[tuple[Digest, int] | None, str] = field(init=False)

    def __post_init__(self) -> None:
        self._recorded = Batched(self._record, _AT_ONCE)

    def put(self, digest: Digest, content: Buffer | bytes, stop: Callable[[], bool] = lambda: False) -> bool:
        """Make the chunk durable, with a reference of the set. Returns False if it was stored before.

        Blocking, not on the loop.

        Raises:
            SetEndedError: the owner of the set has ended.
            ChunkIsLeavingError: the chunk was still being deleted after a minute.
            StoreUnavailableError: the store or the database is away.
        """
        if is_new := self.put_early(digest, content, stop):
            answer_of(self._loop, self.settle())
        return is_new

    def put_early(self, digest: Digest, content: Buffer | bytes, stop: Callable[[], bool] = lambda: False) -> bool:
        """As ``put``, but the chunk counts as stored only from ``settle`` on: many chunks share a transaction."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            # The PUT has to end before the row counts as abandoned: see ``chunks.PUT_SECONDS``.
            state = answer_of(self._loop, self._recorded.of((digest, len(content))))
            if state == "stored":
                return False
            if state == "put":
                self.store.put(digest, memoryview(content), writer=self.organisation)
                self._loop.call_soon_threadsafe(self._note_durable, digest)
                return True
            if time.monotonic() > deadline or stop():
                raise ChunkIsLeavingError(f"chunk {digest} is being deleted; try again in a few minutes")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _note_durable(self, digest: Digest) -> None:
        self._durable.add(digest)
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle_soon())

    async def _settle_soon(self) -> None:
        """A mirror that is canceled or killed loses little; what fails is left to ``settle``."""
        with suppress(BdnError, SetEndedError):
            while self._durable:
                await self.settle()

    async def settle(self) -> None:
        """Record all durable chunks as stored. Raises ``SetEndedError``: the objects may be gone again."""
        await self._recorded.of(None)

    async def hold(self, digests: Iterable[Digest]) -> dict[Digest, int]:
        """Refer to the chunks that are stored. Returns them with their sizes. Raises ``SetEndedError``."""
        held: dict[Digest, int] = {}
        for some in batches(list(digests), _HELD_AT_ONCE):
            async with self.database.write() as session:
                held |= await chunks.of(session, chunks.hold, self.set_id, some)
        return held

    async def _record(self, wanted: Sequence[tuple[Digest, int] | None]) -> list[str]:
        """Acquire chunks of these sizes, and record what is durable. Returns the state of each chunk."""
        sizes = dict(one for one in wanted if one is not None)
        durable = frozenset(self._durable)
        if not sizes and not durable:
            return [""] * len(wanted)
        async with self.database.write() as session:
            found = await damaged.acquire(session, self.set_id, sizes, self.database.now(), durable)
        self._durable -= durable
        states = dict.fromkeys(found.stored, "stored") | dict.fromkeys(found.put, "put")
        return ["" if one is None else states.get(one[0], "leaving") for one in wanted]


def put_manifest(files: Iterable[PlacedFile], put: Callable[[Digest, Buffer], object]) -> Root:
    """Put the pages and the root of files in path order. Blocking."""
    manifest = ManifestWriter()
    for file in files:
        for page in manifest.add(file):
            put(page.digest, memoryview(page.content))
    for document in manifest.finish():
        put(document.digest, memoryview(document.content))
    return manifest.root
