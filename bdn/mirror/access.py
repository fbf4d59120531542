"""Who calls, and what they may read. A digest alone grants nothing."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.mirror.database import Database
from bdn.mirror.repository import contents, mirrors
from bdn.wire.grants import GrantVerifier

DEFAULT_ORGANISATION = "default"
_CHUNKS_KEPT = 500_000  # about 50 MB; as many chunks are 4 TB


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with a token, or anybody where authentication is off."""

    organisation: str


@dataclass(frozen=True)
class Access:
    """Checks bearers: the service's token for everything, a grant for reading what it names.

    ``token`` None is authentication off; then the service is bound to loopback, and everybody there is the operator.
    """

    token: str | None = field(repr=False)
    verifier: GrantVerifier
    database: Database
    _chunks: dict[str, frozenset[bytes]] = field(default_factory=dict, repr=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def caller(self, bearer: str | None) -> Caller:
        """The caller behind a token; ``UnauthenticatedError`` otherwise."""
        if self.token is None or self._is_token(bearer):
            return Caller(DEFAULT_ORGANISATION)
        raise UnauthenticatedError

    async def check_manifest(self, bearer: str | None, manifest: Digest) -> None:
        """May the bearer read this manifest? Not yours and not there look alike: ``NotFoundError``."""
        organisation = DEFAULT_ORGANISATION
        if self.token is not None and not self._is_token(bearer):
            if bearer is None:
                raise UnauthenticatedError
            grant = self.verifier.verify(bearer, now=time.time())
            if not grant.allows(manifest):
                raise NotFoundError(f"manifest {manifest}")
            organisation = grant.organisation
        async with self.database.read() as session:
            if not await mirrors.may_read(session, organisation, manifest.hex):
                raise NotFoundError(f"manifest {manifest}")

    async def check_chunk(self, bearer: str | None, chunk: Digest) -> None:
        """May the bearer read this chunk, because its grant names a manifest that contains it?"""
        if self.token is None or self._is_token(bearer):
            return
        if bearer is None:
            raise UnauthenticatedError
        grant = self.verifier.verify(bearer, now=time.time())
        for mount in grant.mounts:
            if chunk.to_bytes() in await self._chunks_of(mount.manifest):
                return
        raise NotFoundError(f"chunk {chunk}")

    def _is_token(self, bearer: str | None) -> bool:
        return (
            bearer is not None and self.token is not None and hmac.compare_digest(bearer.encode(), self.token.encode())
        )

    async def _chunks_of(self, manifest: Digest) -> frozenset[bytes]:
        """Manifests are immutable, so what they contain can be kept; one reader looks, the others wait for it."""
        if (known := self._chunks.get(manifest.hex)) is not None:
            return known
        async with self._looking:
            if (known := self._chunks.get(manifest.hex)) is not None:
                return known
            async with self.database.read() as session:
                layouts = await contents.layouts(session, manifest.hex)
            found = await asyncio.to_thread(
                lambda: frozenset(chunk for *_, raw in layouts for chunk in contents.split_digests(raw))
            )
            if sum(map(len, self._chunks.values())) + len(found) > _CHUNKS_KEPT:
                self._chunks.clear()
            if found:
                self._chunks[manifest.hex] = found
            return found
