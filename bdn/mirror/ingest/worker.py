"""Takes mirrors from the database and works on them. Any number of workers; a killed one's mirrors are taken over."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from bdn.core.errors import BdnError, InternalError
from bdn.core.groups import single_error
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.db.errors import DatabaseUnavailableError
from bdn.mirror.db.tables import MirrorRow, MirrorSourceRow
from bdn.mirror.ingest.ingest import Ingest
from bdn.mirror.ingest.progress import ClaimLostError, Progress
from bdn.mirror.watch import Watch
from bdn.wire.errors import body_of

logger = logging.getLogger(__name__)

CLAIM_SECONDS: Final = 15.0
RENEW_SECONDS: Final = 3.0
FLUSH_SECONDS: Final = 0.5
POLL_SECONDS: Final = 1.0
NEW_WORK: Final = "new work"


@dataclass(frozen=True)
class Worker:
    """Works on up to ``jobs`` mirrors at once."""

    database: Database
    ingest: Ingest
    watch: Watch
    jobs: int
    on_transferred: Callable[[int], None]
    name: str = field(default_factory=lambda: f"{socket.gethostname()[:200]}:{os.getpid()}:{os.urandom(4).hex()}")
    _claims: Iterator[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work in the background until the block ends; then give unfinished mirrors back."""
        try:
            with single_error():
                async with asyncio.TaskGroup() as group:
                    taking = group.create_task(self._take_work())
                    yield
                    taking.cancel()
        finally:
            async with self.database.write() as session:
                await mirrors.release_claims(session, self.name)

    async def _take_work(self) -> None:
        free = asyncio.Semaphore(self.jobs)
        async with asyncio.TaskGroup() as works:
            while True:
                await free.acquire()
                # A new name for each claim: one that ran out may be taken again by this very worker.
                claimant = f"{self.name}:{next(self._claims)}"
                mirror_id = None
                with self._surviving():
                    mirror_id = await self._claim(claimant)
                if mirror_id is not None:
                    works.create_task(self._work(mirror_id, claimant)).add_done_callback(lambda _: free.release())
                else:
                    free.release()
                    await self.watch.changed(NEW_WORK, POLL_SECONDS)

    async def _claim(self, claimant: str) -> str | None:
        now = time.time()
        async with self.database.write() as session:
            return await mirrors.claim(session, claimant, now=now, until=now + CLAIM_SECONDS)

    @staticmethod
    @contextmanager
    def _surviving() -> Iterator[None]:
        """Whatever happens to one mirror, the worker and with it everybody else's mirrors go on."""
        try:
            yield
        except BdnError as error:  # the database is away: the claim runs out, and the mirror goes on when it is back
            logger.warning("worker cannot reach its database", extra={"error": str(error)})
        except Exception:
            logger.exception("worker failed; the mirror's claim will run out, and somebody goes on with it")

    async def _work(self, mirror_id: str, claimant: str) -> None:
        """Bring a claimed mirror to its end."""
        with self._surviving():
            async with self.database.read() as session:
                found = await mirrors.get_any(session, mirror_id)
            if found is not None:
                await self._work_on(*found, claimant)

    async def _work_on(self, row: MirrorRow, sources: list[MirrorSourceRow], claimant: str) -> None:
        self.watch.notify(row.id)
        logger.info("mirroring", extra={"mirror": row.id, "sources": len(sources)})

        def flushed(keys: list[str]) -> None:
            self.ingest.copies.recorded(keys, row.id)
            self.watch.notify(row.id)

        progress = Progress(self.database, row.id, claimant, flushed, self.on_transferred)
        with single_error():
            async with asyncio.TaskGroup() as group:
                holding = group.create_task(self._hold_claim(row.id, claimant))
                try:
                    await self._run(row, sources, progress)
                except ClaimLostError:
                    logger.info("mirror was taken away", extra={"mirror": row.id})
                    async with self.database.write() as writing:
                        await mirrors.release_claims(writing, claimant)
                finally:
                    progress.abandon()
                    holding.cancel()
                    self.watch.notify(row.id)

    async def _hold_claim(self, mirror_id: str, claimant: str) -> None:
        """Until this worker has come to its end, also with a mirror that was canceled, nothing is collected that it brings.

        A is canceled, and waits for a thread; its claim runs out; a collection deletes a chunk that A's last files count on;
        A comes to its end, and records these files.
        """
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(BdnError):
                async with self.database.write() as session:
                    now = time.time()
                    await mirrors.hold_canceled_claim(session, mirror_id, claimant, now, now + CLAIM_SECONDS)

    async def _run(self, row: MirrorRow, sources: list[MirrorSourceRow], progress: Progress) -> None:
        failure: BdnError | None = None
        try:
            with single_error():
                async with asyncio.TaskGroup() as group:
                    keeper = group.create_task(self._keep_claim(row.id, progress.claimant))
                    flusher = group.create_task(self._flush(progress))
                    await self.ingest.run(row.id, row.organisation, sources, progress)
                    keeper.cancel()
                    flusher.cancel()
        except asyncio.CancelledError:
            with suppress(BdnError, ClaimLostError):
                await progress.flush()
            raise
        except ClaimLostError:
            await progress.flush()  # of a canceled mirror; for one that another worker took over it raises again
            raise
        except DatabaseUnavailableError:
            raise
        except BdnError as error:
            failure = error
        except Exception as error:
            logger.exception("mirroring failed", extra={"mirror": row.id})
            failure = InternalError(f"{type(error).__name__} while mirroring")
        await progress.flush()
        if _is_stopping():
            raise asyncio.CancelledError
        if failure:
            logger.info("mirror failed", extra={"mirror": row.id, "code": failure.code})
        async with progress.writing() as session:
            error_body = body_of(failure).model_dump() if failure else None
            status = "FAILED" if failure else "READY"
            await mirrors.finish(session, row.id, status, now=time.time(), error=error_body)

    async def _keep_claim(self, mirror_id: str, claimant: str) -> None:
        while True:
            await self.watch.changed(f"{mirror_id} canceled", RENEW_SECONDS)
            async with self.database.write() as session:
                if not await mirrors.renew_claim(session, mirror_id, claimant, time.time() + CLAIM_SECONDS):
                    raise ClaimLostError

    @staticmethod
    async def _flush(progress: Progress) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await progress.flush()


def _is_stopping() -> bool:
    """Whether this task was canceled, also when a task group that failed at the same moment lost it (Python 3.11)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
