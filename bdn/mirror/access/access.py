"""Who calls, and what they may read. A digest alone grants nothing."""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bdn.core.chunk import CHUNK_SIZE, Digest
from bdn.core.errors import GrantInvalidError, NotFoundError, UnauthenticatedError
from bdn.core.source.uri import CheckpointUri
from bdn.core.store import organisation_of, reader_of, team_of
from bdn.mirror.db import contents, mirrors
from bdn.mirror.db.tokens import TokenTable, is_token
from bdn.mirror.db.waiting import SharedReads
from bdn.wire.access_schema import DEFAULT_ORGANISATION, Role
from bdn.wire.grants import Grant, GrantVerifier, PushGrant

_OBJECTS_KEPT: Final = (
    500_000  # about 50 MB; as many chunks and slabs are up to 4 TB. Beyond it each chunk is looked up
)
_IN_USE_SECONDS: Final = 60.0  # since its last chunk a manifest makes room for no other
_STANDING_SECONDS: Final = 1.0  # for which a reader of chunks goes on after its manifest was given up
_STANDING_KEPT: Final = 10_000
_TAKES_GRANTS: Final = re.compile(r"/chunks/.+|/manifests/[^/]+(/layout)?|/pushes(?!/grants$)(/.*)?")
_OF_FILES: Final = "/files/"  # whose addresses are signed
_NOT: Final = (0.0, 0)

_Key = tuple[str, str]  # a manifest, and the organisation or team that reads it


class NotPermittedError(UnauthenticatedError):
    """The token is good, but not for this: what is needed is another one. Says nothing of what exists."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with a token, or anybody where authentication is off. ``cluster`` binds an agent's token to one cluster.

    One of a ``team`` sees what is that team's alone; None: all of the organisation.
    """

    organisation: str
    role: Role
    cluster: str | None = None
    team: str | None = None

    def acting(self, needed: Role, organisation: str | None) -> Caller:
        """The caller, for a call that needs this role and names this organisation (None: its own), or ``NotPermittedError``."""
        if self.role is Role.OPERATOR:
            return Caller(organisation or self.organisation, self.role)
        if self.role is not needed:
            raise NotPermittedError(f"a token of role {self.role} may not do this: it takes one of role {needed}")
        if organisation not in (None, self.organisation):
            raise NotPermittedError(
                "BDN-Organisation names another organisation than the token's; that takes an operator"
            )
        return self

    def of_all_teams(self) -> Caller:
        """The caller, for what is the organisation's and no team's. Raises ``NotPermittedError``."""
        if self.team is not None:
            raise NotPermittedError(f"this token is for what team {self.team!r} has alone: it takes one without a team")
        return self

    def check_cluster(self, cluster: str) -> None:
        """Refuse to speak for an agent of another cluster. Raises ``NotPermittedError``."""
        if self.cluster not in (None, cluster):
            raise NotPermittedError(f"this token is for agents of cluster {self.cluster!r} alone")


@dataclass(frozen=True, slots=True)
class PushAccess:
    """Who may push in the name of an organisation: what ``grant`` says, or without one all that the organisation, or its ``team``, may."""

    organisation: str
    team: str | None = None
    grant: PushGrant | None = None
    is_operator: bool = False

    def may_push(self, checkpoint: CheckpointUri) -> bool:
        """Whether it is the bearer's."""
        return self.grant is None or self.grant.allows(checkpoint)


_OPERATOR: Final = Caller(DEFAULT_ORGANISATION, Role.OPERATOR)


class OpenedObjects:
    """The objects that a grant for a manifest opens, by manifest and organisation: ``limit`` of them at most, in all.

    Who was read from least recently goes first, but not within ``_IN_USE_SECONDS``: manifests that do not fit together
    would push each other out at each chunk.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._kept: dict[_Key, tuple[float, frozenset[bytes]]] = {}  # least recently used first
        self._total = 0

    def get(self, key: _Key) -> frozenset[bytes] | None:
        """They are used now."""
        if (known := self._kept.pop(key, None)) is None:
            return None
        self._kept[key] = (self._clock(), known[1])
        return known[1]

    def make_room(self, size: int) -> bool:
        """Whether so many more can be kept now."""
        while size <= self._limit < self._total + size:
            key, (used_at, objects) = next(iter(self._kept.items()))
            if self._clock() - used_at < _IN_USE_SECONDS:
                break
            del self._kept[key]
            self._total -= len(objects)
        return self._total + size <= self._limit

    def keep(self, key: _Key, objects: frozenset[bytes]) -> None:
        """If there is room."""
        if key not in self._kept and self.make_room(len(objects)):
            self._kept[key] = (self._clock(), objects)
            self._total += len(objects)


@dataclass(frozen=True)
class Access:
    """Checks tokens for what a role may do, grants for what they name. No ``token``: everybody is the operator."""

    token: str | None = field(repr=False)
    tokens: TokenTable
    verifier: GrantVerifier
    _objects: OpenedObjects = field(default_factory=lambda: OpenedObjects(_OBJECTS_KEPT), repr=False)
    # Until when a manifest stands, and how many objects it can have.
    _standing: dict[_Key, tuple[float, int]] = field(default_factory=dict, repr=False)
    _reads: SharedReads[_Key, frozenset[bytes]] = field(default_factory=partial(SharedReads, math.inf))

    async def caller(self, bearer: str | None) -> Caller:
        """The caller behind a token; ``UnauthenticatedError`` otherwise, whatever the reason."""
        known = self._operator(bearer)
        if known is None and bearer is not None and is_token(bearer):
            token = await self.tokens.valid(bearer)
            known = Caller(token.organisation, token.role, token.cluster, token.team) if token else None
        if known is not None:
            return known
        if bearer is None:
            raise UnauthenticatedError
        raise UnauthenticatedError("the token is not known here, or it was revoked or has expired")

    async def identify(self, bearer: str | None, path: str, signature: str = "") -> str:
        """The organisation of a caller by the head of a request alone, whatever it may do: of its token, grant or signed address.

        Raises ``UnauthenticatedError``, or for what has the form of a grant ``GrantInvalidError``, ``GrantExpiredError``.
        """
        now = time.time()
        if path.startswith(_OF_FILES):
            return self.verifier.verify_file(signature, now=now).organisation
        takes_grants = _TAKES_GRANTS.fullmatch(path) is not None
        if bearer is None or self._operator(bearer) or not takes_grants or is_token(bearer):
            return (await self.caller(bearer)).organisation
        try:
            return self.verifier.verify_push(bearer, now=now).organisation
        except GrantInvalidError:  # it may be one to read
            return self.verifier.verify(bearer, now=now).organisation

    async def pusher(self, bearer: str | None, organisation: str | None = None) -> PushAccess:
        """Who pushes: a controller, for all jobs of its organisation, or the bearer of a grant to push, for one rank of one job."""
        if bearer is None or self.token is None or self._operator(bearer) or is_token(bearer):
            caller = (await self.caller(bearer)).acting(Role.CONTROLLER, organisation)
            return PushAccess(caller.organisation, caller.team, is_operator=caller.role is Role.OPERATOR)
        grant = self.verifier.verify_push(bearer, now=time.time())
        if organisation not in (None, grant.organisation):
            raise NotPermittedError("BDN-Organisation names another organisation than the grant's")
        return PushAccess(grant.organisation, grant.team, grant)

    async def is_agent(self, token: str | None) -> bool:
        """Whether the bearer is a token of an agent or of the operator."""
        try:
            return token is not None and (await self.caller(token)).role in (Role.AGENT, Role.OPERATOR)
        except UnauthenticatedError:
            return False

    async def check_manifest(self, bearer: str | None, manifest: Digest, organisation: str | None = None) -> str:
        """As which organisation or team (``reader_of``) the bearer may read this manifest, or ``NotFoundError``.

        An operator acts for ``organisation``.
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
        return reader_of(owner, team)

    async def check_chunk(self, bearer: str | None, chunk: Digest) -> str:
        """May the bearer read this chunk, because its grant names a manifest that contains it, or a file inside it?"""
        return await self.check_chunks(bearer, [chunk])

    async def check_chunks(self, bearer: str | None, chunks: Sequence[Digest], manifest: Digest | None = None) -> str:
        """Check that the bearer may read all of these chunks; with ``manifest``, as chunks of that manifest. Returns the bearer's organisation.

        A slab is read as a whole, with the neighbours of the file that is wanted; so it must be one that the grant's
        organisation or team packed, or of public files. Of tokens the operator's alone reads chunks: the others' callers have grants.
        """
        reader = await self._reader(bearer)
        if isinstance(reader, Caller):
            return reader.acting(Role.OPERATOR, None).organisation
        owner = reader.reader
        named = [mount.manifest.hex for mount in reader.mounts if manifest in (None, mount.manifest)]
        manifests, left = await self._standing_of(named, owner), list(chunks)
        for name, count in manifests.items():
            objects = await self._objects_of(name, owner, count)
            left = [chunk for chunk in left if chunk.to_bytes() not in objects]
            if not left:
                return reader.organisation
        # Of a manifest that is not kept, a packed file by its own name, or a slab that came since we looked.
        opened = await self._opened(manifests, owner, left)
        for chunk in left:
            if chunk.hex not in opened:
                raise NotFoundError(f"chunk {chunk}")
        return reader.organisation

    async def _reader(self, bearer: str | None) -> Caller | Grant:
        """Who reads: by a token, or by a grant, which is its own proof."""
        if bearer is None or self.token is None or self._operator(bearer) or is_token(bearer):
            return await self.caller(bearer)
        return self.verifier.verify(bearer, now=time.time())

    def _operator(self, bearer: str | None) -> Caller | None:
        if self.token is None:
            return _OPERATOR
        is_his = bearer is not None and hmac.compare_digest(bearer.encode(), self.token.encode())
        return _OPERATOR if is_his else None

    async def _opened(self, manifests: Collection[str], reader: str, chunks: Sequence[Digest]) -> set[str]:
        if not manifests or not chunks:
            return set()
        async with self.tokens.database.read() as session:
            return await contents.opened(session, list(manifests), reader, [chunk.hex for chunk in chunks])

    async def _standing_of(self, manifests: Iterable[str], reader: str) -> dict[str, int]:
        """The manifests that the organisation or team may still read, as of at most a second ago, and how many objects each can have.

        A reader asks a hundred times a second.
        """
        now, names = time.monotonic(), dict.fromkeys(manifests)
        known = {name: self._standing.get((name, reader), _NOT) for name in names}
        standing = {name: objects for name, (until, objects) in known.items() if until > now}
        asked = [name for name in names if name not in standing]
        if asked:
            async with self.tokens.database.read() as session:
                found = await mirrors.readable(session, organisation_of(reader), asked, team_of(reader))
            if len(self._standing) > _STANDING_KEPT:
                self._standing.clear()
            for name in asked:
                self._standing.pop((name, reader), None)
            for name, (files, size) in found.items():
                standing[name] = files + size // CHUNK_SIZE
                self._standing[name, reader] = now + _STANDING_SECONDS, standing[name]
        return standing

    async def _objects_of(self, manifest: str, reader: str, count: int) -> frozenset[bytes]:
        """Manifests are immutable, so what they contain, ``count`` at most, can be kept. Nothing where there is no room for it."""
        key = (manifest, reader)
        if (known := self._objects.get(key)) is not None:
            return known
        if not self._objects.make_room(count):
            return frozenset()

        async def read() -> frozenset[bytes]:
            async with self.tokens.database.read() as session:
                found = await contents.objects(session, manifest, reader)
            if found:
                self._objects.keep(key, found)
            return found

        return await self._reads.of(key, read).get()
