"""Chunks from another of our programs: the client side of the data plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.transfer.connections import NETWORK_ERRORS, ConnectionPool, reason_of
from bdn.transfer.http1 import Answer
from bdn.transfer.http_request import split_address
from bdn.wire.errors import error_from
from bdn.wire.paths import chunk_path

_REDIRECT_LIMIT: Final = 2  # the mirror may send us to a signed URL of its store
_WORDS_LIMIT: Final = 64 * 1024  # of a redirect or an error


@dataclass(frozen=True)
class HttpChunkReader:
    """A ``ChunkReader`` over HTTP. ``bearer`` is the grant that names a manifest with the chunks that will be asked for."""

    connections: ConnectionPool
    base_url: str
    bearer: str | None = field(default=None, repr=False)

    def read_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill ``buffer`` with the chunk; content is *not* verified here."""
        url = urljoin(self.base_url, chunk_path(digest))
        headers = {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}
        try:
            for _ in range(_REDIRECT_LIMIT + 1):
                with self.connections.get(url, headers, len(buffer)) as answer:
                    if answer.status not in (302, 307):
                        self._read_body(answer, digest, buffer)
                        return
                    answer.read(_WORDS_LIMIT)
                    target = urljoin(url, answer.headers.get("Location") or "")
                    if split_address(target)[0] != split_address(url)[0]:
                        headers = {}
                    url = target
        except NETWORK_ERRORS as error:
            reason = f"{urlsplit(self.base_url).netloc}: {reason_of(error)}"
            raise StoreUnavailableError(reason) from None  # its message may hold a signed address
        raise StoreUnavailableError(f"{urlsplit(self.base_url).netloc}: too many redirects")

    @staticmethod
    def _read_body(answer: Answer, digest: Digest, buffer: memoryview) -> None:
        if answer.status == 404:
            answer.read(_WORDS_LIMIT)
            raise NotFoundError(f"chunk {digest}")
        if answer.status != 200:
            raise error_from(answer.status, answer.read(_WORDS_LIMIT))
        if answer.length != len(buffer):
            raise StoreUnavailableError(f"chunk {digest} came with {answer.length} bytes instead of {len(buffer)}")
        if (done := answer.fill(buffer)) != len(buffer):
            raise StoreUnavailableError(f"chunk {digest} ended after {done} of {len(buffer)} bytes")
