"""A peer that asks an agent of this process for chunks, as agents ask one another."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from bdn.core.digest import Digest, digest_of
from bdn.core.manifest import Manifest
from bdn.net.http1.pool import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from tests.support.content.readers import read_named


async def ask(
    pool: ConnectionPool,
    port: int,
    chunk: bytes | Digest,
    grant: str | None,
    manifest: Manifest | None = None,
    size: int = 0,
    *,
    is_suspect: bool = False,
) -> bytes:
    """What a peer gets. ``size`` is the length of a chunk that is given by its name, or of another one's buffer."""
    digest = chunk if isinstance(chunk, Digest) else digest_of(chunk)
    size = size or (len(chunk) if isinstance(chunk, bytes) else 0)
    reader = HttpChunkReader(
        pool, f"http://127.0.0.1:{port}", grant, manifest.digest if manifest else None, is_suspect=is_suspect
    )
    # Not the loop's own threads: the agent in this process needs them to answer.
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, read_named, reader, digest, size)
