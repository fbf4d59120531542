"""Chunks from another of our programs: the client side of the data plane."""

from __future__ import annotations

import http.client
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urljoin, urlsplit

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, StoreUnavailableError
from bdn.transfer.connections import NETWORK_ERRORS, ConnectionPool, origin_of, read_exactly, reason_of
from bdn.wire.errors import error_from
from bdn.wire.paths import chunk_path

_REDIRECT_LIMIT: Final = 2  # the mirror may send us to a signed URL of its store


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
                with self.connections.get(url, headers) as response:
                    if response.status not in (302, 307):
                        self._read_body(response, digest, buffer)
                        return
                    response.read()
                    target = urljoin(url, response.headers.get("Location") or "")
                    if origin_of(urlsplit(target)) != origin_of(urlsplit(url)):
                        headers = {}
                    url = target
        except NETWORK_ERRORS as error:
            reason = f"{urlsplit(self.base_url).netloc}: {reason_of(error)}"
            raise StoreUnavailableError(reason) from None  # its message may hold a signed address
        raise StoreUnavailableError(f"{urlsplit(self.base_url).netloc}: too many redirects")

    @staticmethod
    def _read_body(response: http.client.HTTPResponse, digest: Digest, buffer: memoryview) -> None:
        if response.status == 404:
            response.read()
            raise NotFoundError(f"chunk {digest}")
        if response.status != 200:
            raise error_from(response.status, response.read())
        length = response.headers.get("Content-Length")
        if length != str(len(buffer)):
            raise StoreUnavailableError(f"chunk {digest} came with {length} bytes instead of {len(buffer)}")
        if (done := read_exactly(response, buffer)) != len(buffer):
            raise StoreUnavailableError(f"chunk {digest} ended after {done} of {len(buffer)} bytes")
        response.read()
