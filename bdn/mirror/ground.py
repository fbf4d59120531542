"""What a running mirror stands on: database and store, its keys, and what is known to be wrong in the store."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bdn.core.errors import InUseError
from bdn.core.ports import MirrorStore
from bdn.disk.make_folder import make_folder
from bdn.mirror.damages import Damages
from bdn.mirror.db import mirrors
from bdn.mirror.db.database import Database
from bdn.mirror.keys import load_signer
from bdn.mirror.metrics import Metrics
from bdn.mirror.settings import MirrorSettings
from bdn.mirror.store_opener import open_store
from bdn.mirror.suspects import Suspects
from bdn.mirror.upstream.sealing import Keyring
from bdn.mirror.watch import Watch
from bdn.wire.grants import GrantSigner


@dataclass(frozen=True)
class Ground:
    """``clock`` tells when credentials and identity tokens end and agents are silent; ``keyring`` opens sealed secrets."""

    settings: MirrorSettings
    clock: Callable[[], float]
    keyring: Keyring
    database: Database
    store: MirrorStore
    watch: Watch
    metrics: Metrics
    suspects: Suspects
    damages: Damages
    signer: GrantSigner


async def open_ground(
    stack: AsyncExitStack, settings: MirrorSettings, program: str, clock: Callable[[], float]
) -> Ground:
    """Until the stack ends. ``program`` is what a second mirror on this data directory is told of the first.

    Raises:
        InvalidRequestError: a setting makes no sense.
        InUseError: another process has the data directory.
    """
    keyring = Keyring.parse(settings.secrets_key)
    database, store = await _open_memory(stack, settings, program)
    watch, metrics = Watch(), Metrics(database, store)
    suspects = Suspects(watch)
    metrics.damaged_records.set_function(lambda: len(suspects.found))
    damages = Damages(database, store, watch, clock, metrics.repaired_chunks.inc)
    signer = load_signer(settings.data_dir)
    return Ground(settings, clock, keyring, database, store, watch, metrics, suspects, damages, signer)


async def _open_memory(stack: AsyncExitStack, settings: MirrorSettings, program: str) -> tuple[Database, MirrorStore]:
    """What outlives the process: the database at this version's schema, and the store."""
    make_folder(settings.data_dir)
    if settings.is_embedded:
        stack.enter_context(_single_process(settings.data_dir, program))
    database = Database(settings.effective_database_url)
    stack.push_async_callback(database.close)
    if settings.is_embedded:
        await database.migrate()
        async with database.write() as session:
            await mirrors.release_claims(session)
    else:
        await database.check_version()
    store = await asyncio.to_thread(open_store, settings.effective_store, exclusive=settings.is_embedded)
    return database, store


@contextmanager
def _single_process(data_dir: Path, program: str) -> Iterator[None]:
    """The embedded database is one process's: a second one is told so. The kernel drops the lock with the process."""
    with (data_dir / "mirror.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise InUseError(f"the data directory {data_dir}", (holder,)) from None
        lock.truncate(0)
        lock.write(f"{program} (process {os.getpid()})")
        lock.flush()
        yield
