"""What it costs the mirror to see that a grant opens a chunk, when it is read from more manifests than it keeps in memory."""

import asyncio
import random
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from sqlalchemy import insert

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.mirror.access.access import Access
from bdn.mirror.db import chunks
from bdn.mirror.db.database import Database, batches
from bdn.mirror.db.tables import ManifestRow, MirrorRow, MirrorSourceRow
from bdn.mirror.db.tokens import TokenTable
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, GrantVerifier, new_signing_key
from bench.report import Figure, scaled
from tests.support.content.names import named

CHUNKS = 100  # of each file
_READ = 2000


def measure() -> Sequence[Figure]:
    """Chunks of 4 manifests in turn, which fit together, and of 16, which do not."""
    return asyncio.run(_measure())


async def _measure() -> Sequence[Figure]:
    count_of_chunks = scaled(100_000)
    with TemporaryDirectory() as folder:
        database = Database(f"sqlite+aiosqlite:///{folder}/mirror.sqlite")
        await database.migrate()
        manifests = [await publish(database, f"manifest {number}", count_of_chunks // CHUNKS) for number in range(16)]
        signer = GrantSigner(new_signing_key())
        figures = []
        for count in (4, 16):
            access = Access("secret", TokenTable(database, time.time), GrantVerifier(signer.public_keys))
            readers = [
                (
                    signer.sign(
                        Grant("o", (GrantedMount("/m", manifest, "hf://org/model"),), expires_at=time.time() + 3600)
                    ),
                    names,
                )
                for manifest, names in manifests[:count]
            ]
            for grant, names in readers:
                await access.check_chunk(grant, names[0])
            turns = random.Random(1)
            asked = [(grant, turns.choice(names)) for _ in range(_READ // count) for grant, names in readers]
            cpu, began = time.process_time(), time.monotonic()
            for grant, name in asked:
                await access.check_chunk(grant, name)
            what = f"chunks of {count} manifests of {count_of_chunks} chunks in turn: may they be read"
            figures += [
                Figure(f"{what}: CPU per chunk", "ms", (1000 * (time.process_time() - cpu) / len(asked),)),
                Figure(f"{what}: time per chunk", "ms", (1000 * (time.monotonic() - began) / len(asked),)),
            ]
        await database.close()
    return figures


async def publish(database: Database, title: str, files: int) -> tuple[Digest, list[Digest]]:
    """A manifest as its mirror leaves it in the database."""
    manifest, now = named(title), time.time()
    names = [named(f"{title} {number}") for number in range(files * CHUNKS)]
    async with database.write() as session:
        set_id = await chunks.of(session, chunks.begin, title)
    for batch in batches(names):
        async with database.write() as session:
            await chunks.of(session, chunks.acquire, set_id, dict.fromkeys(batch, CHUNK_SIZE), now)
            await chunks.of(session, chunks.acquire, set_id, {}, 0.0, batch)
    row = {"digest": manifest.hex, "set_id": set_id, "files_total": files, "bytes_total": len(names) * CHUNK_SIZE}
    mirror = {"id": title, "organisation": "o", "team": "", "request_key": title, "status": "READY", "created_at": now}
    part = {"mirror_id": title, "position": 0, "request": {}, "source": "hf://org/model", "mount_location": "/m"}
    part |= {"status": "READY", "manifest": manifest.hex, "warnings": [], "organisation": "o"}
    async with database.write() as session:
        await chunks.of(session, chunks.publish, set_id)
        await session.execute(insert(ManifestRow), [{**row, "created_at": now, "last_used": now}])
        await session.execute(insert(MirrorRow), [mirror])
        await session.execute(insert(MirrorSourceRow), [part])
    return manifest, names
