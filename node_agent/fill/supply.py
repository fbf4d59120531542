"""Where a fill's chunks come from, as a stack of readers; the only place that knows how deep the stack is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from bdn.core.digest import Digest
from bdn.core.errors import ChecksumMismatchError
from bdn.core.ports import ChunkReader
from bdn.core.retry import RetryPolicy
from bdn.transfer.connections import ConnectionPool
from bdn.transfer.http_chunks import HttpChunkReader
from bdn.transfer.retrying import Retrier, RetryingReader
from bdn.transfer.verifying import VerifyingReader
from bdn.wire.eviction_schema import Tier


class Supply(Protocol):
    """Chunks for one fill, verified, and the word from which tier each came."""

    def fetch(self, digest: Digest, buffer: memoryview) -> Tier:
        """Fill ``buffer`` with the chunk. Blocking; called from byte threads. Raises ``BdnError``."""
        ...


@dataclass(frozen=True)
class MirrorSupply:
    """Everything comes from the mirror."""

    reader: ChunkReader

    def fetch(self, digest: Digest, buffer: memoryview) -> Tier:
        """From the mirror."""
        self.reader.read_into(digest, buffer)
        return "mirror"


@dataclass(frozen=True)
class Supplier:
    """Opens supplies. ``on_mismatch`` counts chunks that arrived with the wrong content."""

    connections: ConnectionPool
    policy: RetryPolicy
    on_mismatch: Callable[[], None]

    def open(self, base_url: str, bearer: str, stop: threading.Event) -> Supply:
        """A supply that stops trying when ``stop`` is set. ``bearer`` is the grant."""
        mirror = HttpChunkReader(self.connections, base_url, bearer)  # one request, one answer
        verified = CountingReader(VerifyingReader(mirror), self.on_mismatch)  # believed only when it hashes to its name
        persistent = RetryingReader(verified, Retrier(self.policy, stop))  # what may pass is tried again
        return MirrorSupply(persistent)  # the node's own cache is in front: what it holds is never asked for


@dataclass(frozen=True)
class CountingReader:
    """Wraps a verifying reader and counts its refusals: a rising figure is a failing disk, wire or peer."""

    inner: ChunkReader
    on_mismatch: Callable[[], None]

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """As the inner reader."""
        try:
            self.inner.read_into(digest, buffer)
        except ChecksumMismatchError:
            self.on_mismatch()
            raise


def chunk_base(api_url: str, data_port: int | None) -> str:
    """The address of a service's data plane: its own host with another port, or its own address."""
    if data_port is None:
        return api_url
    parts = urlsplit(api_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{data_port}", "", "", ""))
