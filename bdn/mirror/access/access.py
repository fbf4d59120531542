"""Authenticates callers, and checks what they may read. A digest alone grants nothing."""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.errors import GrantInvalidError, NotFoundError, UnauthenticatedError
from bdn.core.source.uri import CheckpointUri
from bdn.mirror.db import chunks, manifests, mirrors
from bdn.mirror.db.tokens import TokenTable, digest_of_token, is_token
from bdn.mirror.db.waiting import SharedReads
from bdn.wire.access_schema import DEFAULT_ORGANISATION, Role
from bdn.wire.grants import FileGrant, Grant, GrantVerifier, PushGrant

_OBJECTS_KEPT: Final = 500_000  # about 50 MB, for up to 4 TB of chunks. Beyond it each chunk is queried
_IN_USE_SECONDS: Final = 60.0  # a manifest is not evicted this soon after its last chunk
_STANDING_SECONDS: Final = 1.0  # chunks stay readable this long after their manifest was given up
_STANDING_KEPT: Final = 10_000
_TAKES_GRANTS: Final = re.compile(r"/chunks/.+|/manifests/[^/]+|/pushes(?!/grants$)(/.*)?")
_OF_FILES: Final = "/files/"  # whose addresses are signed

_Key = tuple[str, str, str | None]  # a manifest, and the organisation, or the team of it, that reads it


class NotPermittedError(UnauthenticatedError):
    """The token is valid, but not for this request. Reveals nothing of what exists."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The bearer of a token; any client if authentication is off. ``cluster`` binds an agent's token to one cluster.

    A caller of a ``team`` sees only what that team has; None: all of the organisation.
    """

    organisation: str
    role: Role
    cluster: str | None = None
    team: str | None = None

    def acting(self, needed: Role, organisation: str | None) -> Caller:
        """The caller, acting in this role for this organisation (None: its own). Raises ``NotPermittedError``."""
        if self.role is Role.OPERATOR:
            return Caller(organisation or self.organisation, self.role)
        if self.role is not needed:
            raise NotPermittedError(f"a token of role {self.role} may not do this: use a token of role {needed}")
        if organisation not in (None, self.organisation):
            raise NotPermittedError(
                "BDN-Organisation names another organisation than the token's; only an operator may do that"
            )
        return self

    def of_all_teams(self) -> Caller:
        """The caller, for resources of the whole organisation. Raises ``NotPermittedError`` for a team's token."""
        if self.team is not None:
            raise NotPermittedError(f"this token is limited to team {self.team!r}: use a token without a team")
        return self

    def check_cluster(self, cluster: str) -> None:
        """Raise ``NotPermittedError`` for a token that is bound to another cluster."""
        if self.cluster not in (None, cluster):
            raise NotPermittedError(f"this token is limited to agents of cluster {self.cluster!r}")


@dataclass(frozen=True, slots=True)
class PushAccess:
    """The right to push for an organisation.

    It covers what ``grant`` says, or without a grant all that the organisation, or its ``team``, may.
    """

    organisation: str
    team: str | None = None
    grant: PushGrant | None = None
    is_operator: bool = False

    def may_push(self, checkpoint: CheckpointUri) -> bool:
        return self.grant is None or self.grant.allows(checkpoint)


_OPERATOR: Final = Caller(DEFAULT_ORGANISATION, Role.OPERATOR)


@dataclass(frozen=True, slots=True)
class _Standing:
    """A manifest that a reader may read, cached ``until``. ``count``: an upper estimate of its chunks."""

    until: float
    set_id: int
    count: int


class OpenedObjects:
    """The raw digests of the chunks that a grant for a manifest opens, by the manifest's set; at most ``limit`` in all.

    The manifest that was read least recently is evicted first, but not within ``_IN_USE_SECONDS``: manifests that do
    not fit together would evict each other at each chunk.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._kept: dict[int, tuple[float, frozenset[bytes]]] = {}  # least recently used first
        self._total = 0

    def get(self, set_id: int) -> frozenset[bytes] | None:
        if (known := self._kept.pop(set_id, None)) is None:
            return None
        self._kept[set_id] = (self._clock(), known[1])
        return known[1]

    def make_room(self, size: int) -> bool:
        """Evict until ``size`` more fit. Returns whether they do."""
        while size <= self._limit < self._total + size:
            set_id, (used_at, objects) = next(iter(self._kept.items()))
            if self._clock() - used_at < _IN_USE_SECONDS:
                break
            del self._kept[set_id]
            self._total -= len(objects)
        return self._total + size <= self._limit

    def keep(self, set_id: int, objects: frozenset[bytes]) -> None:
        if set_id not in self._kept and self.make_room(len(objects)):
            self._kept[set_id] = (self._clock(), objects)
            self._total += len(objects)


@dataclass(frozen=True)
class Access:
    """Checks tokens for what a role may do, grants for what they name. Without ``token`` all callers are operators."""

    token: str | None = field(repr=False)
    tokens: TokenTable
    verifier: GrantVerifier
    _objects: OpenedObjects = field(default_factory=lambda: OpenedObjects(_OBJECTS_KEPT), repr=False)
    _standing: dict[_Key, _Standing] = field(default_factory=dict, repr=False)
    _reads: SharedReads[int, frozenset[bytes]] = field(default_factory=partial(SharedReads, math.inf))

    async def caller(self, bearer: str | None) -> Caller:
        """The caller behind a token. Raises ``UnauthenticatedError``, whatever the reason."""
        known = self._operator(bearer)
        if known is None and bearer is not None and is_token(bearer):
            known = await self._holder(digest_of_token(bearer))
        if known is not None:
            return known
        if bearer is None:
            raise UnauthenticatedError
        raise UnauthenticatedError("the token is unknown to this mirror, was revoked or has expired")

    async def holder(self, digest: str) -> Caller | None:
        """The caller behind the token with this SHA-256; None if the token is not valid now."""
        if self.token is not None and hmac.compare_digest(digest, digest_of_token(self.token)):
            return _OPERATOR
        return await self._holder(digest)

    async def _holder(self, digest: str) -> Caller | None:
        token = await self.tokens.valid(digest)
        return Caller(token.organisation, token.role, token.cluster, token.team) if token else None

    async def identify(self, bearer: str | None, path: str, signature: str = "") -> str:
        """The organisation of a token, grant or signed address, from the head of a request alone.

        Does not check permissions. Raises ``UnauthenticatedError``, or for a bearer in the form of a grant
        ``GrantInvalidError`` or ``GrantExpiredError``.
        """
        now = time.time()
        if path.startswith(_OF_FILES):
            return self.verifier.verify_as(FileGrant, signature, now=now).organisation
        takes_grants = _TAKES_GRANTS.fullmatch(path) is not None
        if bearer is None or self._operator(bearer) or not takes_grants or is_token(bearer):
            return (await self.caller(bearer)).organisation
        try:
            return self.verifier.verify_as(PushGrant, bearer, now=now).organisation
        except GrantInvalidError:  # it may be a grant to read
            return self.verifier.verify(bearer, now=now).organisation

    async def pusher(self, bearer: str | None, organisation: str | None = None) -> PushAccess:
        """A controller, for all jobs of its organisation, or the bearer of a grant to push, for one rank of one job."""
        if bearer is None or self.token is None or self._operator(bearer) or is_token(bearer):
            caller = (await self.caller(bearer)).acting(Role.CONTROLLER, organisation)
            return PushAccess(caller.organisation, caller.team, is_operator=caller.role is Role.OPERATOR)
        grant = self.verifier.verify_as(PushGrant, bearer, now=time.time())
        if organisation not in (None, grant.organisation):
            raise NotPermittedError("BDN-Organisation names another organisation than the grant's")
        return PushAccess(grant.organisation, grant.team, grant)

    async def is_agent(self, token: str | None) -> bool:
        """Whether the token is an agent's or the operator's."""
        try:
            return token is not None and (await self.caller(token)).role in (Role.AGENT, Role.OPERATOR)
        except UnauthenticatedError:
            return False

    async def check_manifest(self, bearer: str | None, manifest: Digest, organisation: str | None = None) -> str:
        """Check that the bearer may read this manifest. Returns the bearer's organisation.

        An operator acts for ``organisation``. Raises ``NotFoundError``.
        """
        reader = await self._reader(bearer)
        if isinstance(reader, Caller):
            caller = reader.acting(Role.CONTROLLER, organisation)
            owner, team = caller.organisation, caller.team
        else:
            owner, team = reader.organisation, reader.team
            if not reader.allows(manifest):
                raise NotFoundError(f"manifest {manifest}")
        async with self.tokens.database.read() as session:
            if not await mirrors.may_read(session, owner, manifest.hex, team):
                raise NotFoundError(f"manifest {manifest}")
        return owner

    async def lister(self, bearer: str | None, organisation: str | None = None) -> Caller | Grant:
        """A controller lists every commit of its organisation; a grant lists the commits of its mounts."""
        reader = await self._reader(bearer)
        return reader.acting(Role.CONTROLLER, organisation) if isinstance(reader, Caller) else reader

    async def check_chunk(self, bearer: str | None, chunk: Digest) -> str:
        return await self.check_chunks(bearer, [chunk])

    async def check_chunks(self, bearer: str | None, wanted: Sequence[Digest], manifest: Digest | None = None) -> str:
        """Check that the bearer's grant is for manifests whose sets refer to all of these chunks.

        Returns the bearer's organisation. With ``manifest`` only that manifest counts. Only the operator's token reads
        chunks: other callers have grants.
        """
        reader = await self._reader(bearer)
        if isinstance(reader, Caller):
            return reader.acting(Role.OPERATOR, None).organisation
        names = dict.fromkeys(mount.manifest.hex for mount in reader.mounts if manifest in (None, mount.manifest))
        standing, left, unkept = await self._standing_of(list(names), reader), list(wanted), list[int]()
        for found in standing.values():
            opened = await self._opened_by(found)
            if opened is None:
                unkept.append(found.set_id)
            else:
                left = [chunk for chunk in left if chunk.to_bytes() not in opened]
            if not left:
                return reader.organisation
        if unkept:
            async with self.tokens.database.read() as session:
                named = await chunks.of(session, chunks.known, left, unkept)
            left = [chunk for chunk in left if chunk not in named]
        if left:
            raise NotFoundError(f"chunk {left[0]}")
        return reader.organisation

    async def _reader(self, bearer: str | None) -> Caller | Grant:
        """The caller behind a token, or a grant, which is its own proof."""
        if bearer is None or self.token is None or self._operator(bearer) or is_token(bearer):
            return await self.caller(bearer)
        return self.verifier.verify(bearer, now=time.time())

    def _operator(self, bearer: str | None) -> Caller | None:
        if self.token is None:
            return _OPERATOR
        is_his = bearer is not None and hmac.compare_digest(bearer.encode(), self.token.encode())
        return _OPERATOR if is_his else None

    async def _standing_of(self, names: Sequence[str], grant: Grant) -> dict[str, _Standing]:
        """The manifests that the grant's organisation or team may still read, as of at most a second ago.

        Cached because a reader sends a hundred requests a second.
        """
        now = time.monotonic()
        known = {name: self._standing.get((name, grant.organisation, grant.team)) for name in names}
        standing = {name: found for name, found in known.items() if found is not None and found.until > now}
        asked = [name for name in names if name not in standing]
        if asked:
            async with self.tokens.database.read() as session:
                found = await mirrors.readable(session, grant.organisation, asked, grant.team)
                sets = await manifests.set_ids(session, asked)
            if len(self._standing) > _STANDING_KEPT:
                self._standing.clear()
            for name in asked:
                self._standing.pop((name, grant.organisation, grant.team), None)
            for name, (files, size) in found.items():
                if name in sets:  # or a collection dropped it between the two statements
                    standing[name] = _Standing(now + _STANDING_SECONDS, sets[name], files + size // CHUNK_SIZE)
                    self._standing[name, grant.organisation, grant.team] = standing[name]
        return standing

    async def _opened_by(self, manifest: _Standing) -> frozenset[bytes] | None:
        """The raw digests of the manifest's chunks; None if they do not fit in memory.

        The cache key is the set, which never changes: after a collection, a manifest that is published again has
        another set.
        """
        if (known := self._objects.get(manifest.set_id)) is not None:
            return known
        if not self._objects.make_room(manifest.count):
            return None

        async def read() -> frozenset[bytes]:
            async with self.tokens.database.read() as session:
                found = await chunks.of(session, chunks.names, manifest.set_id)
            opened = frozenset(digest.to_bytes() for digest in found)
            self._objects.keep(manifest.set_id, opened)
            return opened

        return await self._reads.of(manifest.set_id, read).get()
