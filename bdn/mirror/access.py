"""Who calls, and what they may read. A digest alone grants nothing."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.mirror.database import Database
from bdn.mirror.repository import layouts, mirrors
from bdn.wire.grants import GrantVerifier

DEFAULT_ORGANISATION = "default"
_OBJECTS_KEPT = 500_000  # about 50 MB; as many chunks and slabs are up to 4 TB


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
    _objects: dict[tuple[str, str], frozenset[bytes]] = field(default_factory=dict, repr=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    def caller(self, bearer: str | None) -> Caller:
        """The caller behind a token; ``UnauthenticatedError`` otherwise."""
        if self.token is None or self._is_token(bearer):
            return Caller(DEFAULT_ORGANISATION)
        raise UnauthenticatedError

    async def check_manifest(self, bearer: str | None, manifest: Digest) -> str:
        """May the bearer read this manifest? Returns for whom. Not yours and not there look alike: ``NotFoundError``."""
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
        return organisation

    async def check_chunk(self, bearer: str | None, chunk: Digest) -> None:
        """May the bearer read this chunk, because its grant names a manifest that contains it, or a file inside it?

        A slab is read as a whole, with the neighbours of the file that is wanted; so it must be one that the grant's
        organisation packed, or of public files.
        """
        if self.token is None or self._is_token(bearer):
            return
        if bearer is None:
            raise UnauthenticatedError
        grant = self.verifier.verify(bearer, now=time.time())
        for mount in grant.mounts:
            if chunk.to_bytes() in await self._objects_of(mount.manifest, grant.organisation):
                return
        # A packed file by its own name, or a slab that came since we looked: too many to keep, too few to matter.
        async with self.database.read() as session:
            for mount in grant.mounts:
                if await layouts.opens(session, mount.manifest.hex, grant.organisation, chunk.hex):
                    return
        raise NotFoundError(f"chunk {chunk}")

    def _is_token(self, bearer: str | None) -> bool:
        return (
            bearer is not None and self.token is not None and hmac.compare_digest(bearer.encode(), self.token.encode())
        )

    async def _objects_of(self, manifest: Digest, organisation: str) -> frozenset[bytes]:
        """Manifests are immutable, so what they contain can be kept; one reader looks, the others wait for it."""
        key = (manifest.hex, organisation)
        if (known := self._objects.get(key)) is not None:
            return known
        async with self._looking:
            if (known := self._objects.get(key)) is not None:
                return known
            async with self.database.read() as session:
                found = await layouts.objects(session, manifest.hex, organisation)
            if sum(map(len, self._objects.values())) + len(found) > _OBJECTS_KEPT:
                self._objects.clear()
            if found:
                self._objects[key] = found
            return found
