"""Repair of damaged chunks: from agents, without upstream traffic, or from their sources, as mirrored."""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import BdnError, NotFoundError, StoreUnavailableError
from bdn.core.store import MirrorStore
from bdn.mirror.chunks.writer import SetWriter
from bdn.mirror.db import agents, chunks, damaged, origins
from bdn.mirror.db.damaged import Damage
from bdn.mirror.db.database import Database
from bdn.mirror.db.origins import Origin
from bdn.mirror.db.tables import AgentRow, MirrorSourceRow
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.chunk_readers import PartialChunk
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.wire.grants import Grant, GrantedMount, GrantSigner
from bdn.wire.http_fields import is_in_the_clear

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 300.0  # between two attempts to repair the same chunk
_AGENTS: Final = 4  # requests to agents for one chunk
_GRANT_SECONDS: Final = 300
_CHUNK_SECONDS: Final = 120.0  # for one agent to send a chunk; no other repair runs meanwhile

Restore = Callable[[MirrorSourceRow, str, str | None, SetWriter], Awaitable[None]]


@dataclass
class Attempt:
    """Chunks that are still damaged, and why. ``silent`` contains the addresses of agents that failed."""

    left: dict[Digest, Damage]
    silent: set[str] = field(default_factory=set)
    _reasons: defaultdict[Digest, list[tuple[str, str | None]]] = field(default_factory=lambda: defaultdict(list))

    def note(self, digest: Digest, reason: str, organisation: str | None = None) -> None:
        """``organisation`` owns the source that the reason names; None: the reason names no source."""
        self._reasons[digest].append((reason, organisation))

    def reason(self, digest: Digest, asking: str | None = None) -> str:
        """All reasons, without sources of other organisations than ``asking``; None includes all, for the log."""
        told = [
            reason if asking is None or owner in (None, asking) else "another organisation's source does not have it"
            for reason, owner in self._reasons[digest]
        ]
        return "; ".join(dict.fromkeys(told)) or "neither an agent nor a READY source has it"


@dataclass(frozen=True)
class WholeAnswer:
    """An ``AnswerDeadline``: raises ``TimeoutError`` after ``until`` (monotonic), even if bytes trickle in."""

    until: float

    def waiting(self) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError("the agent sends too slowly")

    def at_work(self) -> None:
        self.waiting()

    def receiving(self, count: int) -> None:  # noqa: ARG002 - partial progress does not extend the deadline
        self.waiting()


@dataclass(frozen=True)
class AgentSource:
    """Chunks from the data planes of living agents that hold a manifest which names them.

    With ``requires_tls``, no grant is sent to an agent over plain HTTP.
    """

    database: Database
    connections: ConnectionPool
    signer: GrantSigner
    clock: Callable[[], float] = time.time
    requires_tls: bool = False

    async def fetch(self, wanted: Damage, attempt: Attempt) -> memoryview | None:
        """Return the chunk from the first agent that sends the right bytes. Failures are noted in ``attempt``."""
        async with self.database.read() as session:
            found = await origins.origins(session, wanted.digest)
        asked, since = 0, self.clock() - agents.ALIVE_SECONDS
        buffer = memoryview(bytearray(wanted.size))
        for origin in found:
            async with self.database.read() as session:
                living = await agents.living_holders(session, origin.manifest, since, _AGENTS - asked)
            for row in living:
                asked += 1
                if row.advertise not in attempt.silent and await self._ask(row, origin, wanted.digest, buffer, attempt):
                    return buffer
            if asked == _AGENTS:
                break
        return None

    async def _ask(self, row: AgentRow, origin: Origin, chunk: Digest, buffer: memoryview, attempt: Attempt) -> bool:
        address = str(row.advertise)
        if self.requires_tls and is_in_the_clear(address):
            attempt.note(
                chunk,
                f"agent {row.cluster}/{row.node} is skipped: its address is plain HTTP, and this mirror requires TLS",
            )
            return False
        mount = GrantedMount("/repair", Digest(origin.manifest), origin.row.source)
        grant = self.signer.sign(Grant(origin.organisation, (mount,), self.clock() + _GRANT_SECONDS))
        # Without naming the manifest: an agent that owns the chunk and lacks it would request it from this mirror.
        deadline = WholeAnswer(time.monotonic() + _CHUNK_SECONDS)
        reader = HttpChunkReader(self.connections, address, grant, deadline=deadline)
        try:
            await asyncio.to_thread(reader.read_into, PartialChunk(chunk, buffer))
        except BdnError as error:
            attempt.note(chunk, f"agent {row.cluster}/{row.node}: {error}")
            if not isinstance(error, NotFoundError):
                attempt.silent.add(address)
            return False
        if digest_of(buffer) != chunk:
            attempt.note(chunk, f"agent {row.cluster}/{row.node} has other bytes under this name")
            return False
        return True


@dataclass(frozen=True)
class Repair:
    """Repairs damaged chunks, some at a time.

    Args:
        restore: copies what the store lost of a READY source again (``Ingest.restore``).
        on_repaired: called once for each repaired chunk.
    """

    database: Database
    store: MirrorStore
    agents: AgentSource
    restore: Restore
    clock: Callable[[], float]
    on_repaired: Callable[[], None]
    _tried_at: dict[Digest, float] = field(default_factory=dict)

    def is_due(self, digest: Digest) -> bool:
        """False for ``AGAIN_SECONDS`` after an attempt: a source that failed a moment ago fails again."""
        tried_at = self._tried_at.get(digest)
        return tried_at is None or not 0 <= self.clock() - tried_at < AGAIN_SECONDS

    def leave(self, digest: Digest) -> None:
        """Skip repairs of this chunk for ``AGAIN_SECONDS``."""
        self._tried_at.pop(digest, None)
        self._tried_at[digest] = self.clock()
        while self._tried_at and self.is_due(oldest := next(iter(self._tried_at))):
            del self._tried_at[oldest]

    async def run(self, wanted: Sequence[Damage], asking: str | None = None) -> dict[Digest, str]:
        """Repair these chunks.

        Returns why chunks are still damaged, in words that the organisation ``asking`` may read. Raises
        ``StoreUnavailableError`` if the store or the database is away; chunks that are not repaired stay damaged.
        """
        for damage in wanted:
            self.leave(damage.digest)
        async with self._writer() as writer:
            sizes = {damage.digest: damage.size for damage in wanted}
            async with self.database.write() as session:  # from here on no collection deletes them
                found = await chunks.of(session, chunks.acquire, writer.set_id, sizes, self.clock())
            attempt = Attempt({damage.digest: damage for damage in wanted if damage.digest in found.put})
            for damage in [*attempt.left.values()]:
                await self._repair(damage, attempt, writer)
            await self._restore(attempt, writer)
        for digest, damage in attempt.left.items():
            logger.warning(
                "cannot repair a damaged chunk; mirror its source again",
                extra={"chunk": str(digest), "reason": attempt.reason(digest)},
            )
            async with self.database.write() as session:
                await damaged.record_loss(session, damage, self.clock())
        return {digest: attempt.reason(digest, asking) for digest in attempt.left}

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[SetWriter]:
        async with self.database.write() as session:
            set_id = await chunks.of(session, chunks.begin, f"repair:{secrets.token_hex(12)}")
        try:
            yield SetWriter(self.database, self.store, set_id)
        finally:
            async with self.database.write() as session:
                await chunks.of(session, chunks.end, [set_id], chunks.NO_GRACE)

    async def _repair(self, damage: Damage, attempt: Attempt, writer: SetWriter) -> None:
        """Repair without an upstream: the object is right again (the store was remounted), or an agent has the bytes."""
        try:
            if await asyncio.to_thread(self.store.fault, damage.digest) is None:
                async with self.database.write() as session:
                    await damaged.acquire(session, writer.set_id, {}, self.clock(), [damage.digest])
            elif (content := await self.agents.fetch(damage, attempt)) is not None:
                await asyncio.to_thread(writer.put, damage.digest, content)
            else:
                return
        except StoreUnavailableError as error:
            await asyncio.to_thread(self.store.check)  # raises if the store is away
            attempt.note(damage.digest, str(error))
        else:
            self._done([damage.digest], attempt)

    async def _restore(self, attempt: Attempt, writer: SetWriter) -> None:
        """Restore from the sources that name the remaining chunks: newest first, each source once."""
        tried: dict[tuple[str, str], str] = {}
        for digest in [*attempt.left]:
            async with self.database.read() as session:
                found = await origins.origins(session, digest)
            for origin in found:
                if digest not in attempt.left:
                    break
                source = origin.organisation, origin.row.source
                if source not in tried:
                    tried[source] = await self._from_upstream(origin, attempt, writer)
                attempt.note(digest, tried[source], origin.organisation)

    async def _from_upstream(self, origin: Origin, attempt: Attempt, writer: SetWriter) -> str:
        """Returns why the remaining chunks could not be restored."""
        source = origin.row.source
        reason = f"{source} has changed since it was mirrored; mirror it again"
        try:
            await self.restore(origin.row, origin.organisation, origin.team, writer)
        except BdnError as error:
            await asyncio.to_thread(self.store.check)  # raises if the store is away
            reason = str(error)
        async with self.database.read() as session:
            stored = await chunks.of(session, chunks.stored, attempt.left)
        self._done(stored, attempt)
        return reason

    def _done(self, digests: Iterable[Digest], attempt: Attempt) -> None:
        for digest in digests:
            del attempt.left[digest]
            logger.info("a chunk of the store is repaired", extra={"chunk": str(digest)})
            self.on_repaired()
