"""What it costs the mirror to see that a grant opens a chunk, when it is read from more manifests than it keeps in memory."""

import asyncio
import random
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from sqlalchemy import insert

from bdn.core.chunk import CHUNK_SIZE, Digest, FileLayout, file_digest
from bdn.mirror.access.access import Access
from bdn.mirror.db import contents
from bdn.mirror.db.database import Database, Values, batches
from bdn.mirror.db.tables import ContentRow, ManifestContentRow, ManifestRow, MirrorRow, MirrorSourceRow
from bdn.mirror.db.tokens import TokenTable
from bdn.wire.grants import Grant, GrantedMount, GrantSigner, GrantVerifier, new_signing_key
from tests.benchmarks.report import Figure, scaled
from tests.support.content.names import named

CHUNKS = 100  # of each file
_SIZE = CHUNKS * CHUNK_SIZE
_READ = 2000


def measure() -> Sequence[Figure]:
    """Chunks of 4 manifests in turn, which fit together, and of 16, which do not."""
    return asyncio.run(_measure())


async def _measure() -> Sequence[Figure]:
    chunks = scaled(100_000)
    with TemporaryDirectory() as folder:
        database = Database(f"sqlite+aiosqlite:///{folder}/mirror.sqlite")
        await database.migrate()
        manifests = [await publish(database, f"manifest {number}", chunks // CHUNKS) for number in range(16)]
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
            what = f"chunks of {count} manifests of {chunks} chunks in turn: may they be read"
            figures += [
                Figure(f"{what}: CPU per chunk", "ms", (1000 * (time.process_time() - cpu) / len(asked),)),
                Figure(f"{what}: time per chunk", "ms", (1000 * (time.monotonic() - began) / len(asked),)),
            ]
        await database.close()
    return figures


async def publish(database: Database, title: str, files: int, *, is_read: bool = True) -> tuple[Digest, list[Digest]]:
    """A manifest as its mirror leaves it in the database; one that nobody reads needs no row for each of its chunks."""
    manifest = named(title)
    layouts = []
    for file in range(files):
        names = tuple(named(f"{title} {file} {chunk}") for chunk in range(CHUNKS))
        layouts.append(FileLayout(file_digest(_SIZE, names), _SIZE, names))
    now = time.time()
    row = {"digest": manifest.hex, "canonical": b"", "files_total": files, "created_at": now, "last_used": now}
    mirror = {"id": title, "organisation": "o", "request_key": title, "status": "READY", "created_at": now}
    part = {"mirror_id": title, "position": 0, "request": {}, "source": "hf://org/model", "mount_location": "/m"}
    async with database.write() as session:
        await session.execute(insert(ManifestRow), [{**row, "bytes_total": files * _SIZE}])
        await session.execute(insert(MirrorRow), [mirror])
        part |= {"status": "READY", "manifest": manifest.hex, "warnings": [], "organisation": "o"}
        await session.execute(insert(MirrorSourceRow), [part])
    for batch in batches(layouts):
        async with database.write() as session:
            if is_read:
                await contents.record_contents(session, {layout.digest.hex: layout for layout in batch}, now)
            else:
                await session.execute(insert(ContentRow), [_row(layout, now) for layout in batch])
            rows = [{"manifest": manifest.hex, "content": layout.digest.hex} for layout in batch]
            await session.execute(insert(ManifestContentRow), rows)
    return manifest, [chunk for layout in layouts for chunk in layout.chunks]


def _row(layout: FileLayout, now: float) -> Values:
    chunks = b"".join(chunk.to_bytes() for chunk in layout.chunks)
    return {"digest": layout.digest.hex, "size": layout.size, "chunks": chunks, "recorded_at": now}
