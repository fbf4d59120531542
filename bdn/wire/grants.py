"""Grants: what a job's agents may read and where it shall stand. Tokens (JWT, Ed25519), which agents verify without the mirror."""

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import OKPAlgorithm

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import GrantExpiredError, GrantInvalidError, InvalidSourceError
from bdn.core.source.uri import CheckpointUri, check_mounts, normalise_mount, parse_source
from bdn.core.store import reader_of

AUDIENCE: Final = "bdn-agent"
PUSH_AUDIENCE: Final = "bdn-push"
FILE_AUDIENCE: Final = "bdn-file"
CACHE_AUDIENCE: Final = "bdn-cache"
LONGEST_GRANT: Final = 60 * 1024  # bytes: with 4 KiB for all else it is the head of a request
ISSUER: Final = "bdn-mirror"
_ALGORITHM: Final = "EdDSA"  # RFC 8037
_BEGIN: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.+?-----END \1-----", re.DOTALL)
_ID: Final = re.compile(r"[a-z0-9]{10}")
_REMEMBERED_MOUNTS: Final = 32_768  # of all grants that a verifier remembers, and one for each grant; about 20 MB


@dataclass(frozen=True, slots=True)
class GrantedMount:
    """One manifest and the place where its files shall stand. ``source`` is for people: it names where they came from."""

    mount_location: str
    manifest: Digest
    source: str

    def __post_init__(self) -> None:
        if normalise_mount(self.mount_location) != self.mount_location:
            raise ValueError(f"mount_location {self.mount_location!r} is not normalised")


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of an organisation's job to read these manifests until ``expires_at`` (seconds since the epoch).

    That of a job without weights names none. ``team`` is the team that mirrored them; None: the organisation did.
    """

    organisation: str
    mounts: tuple[GrantedMount, ...]
    expires_at: float
    team: str | None = None

    def __post_init__(self) -> None:
        check_mounts([mount.mount_location for mount in self.mounts])

    @property
    def reader(self) -> str:
        """The organisation or team whose slabs it opens."""
        return reader_of(self.organisation, self.team)

    def allows(self, manifest: Digest) -> bool:
        """Whether this grant lets its bearer read the manifest and its chunks."""
        return any(mount.manifest == manifest for mount in self.mounts)


@dataclass(frozen=True, slots=True)
class PushGrant:
    """The right to push checkpoints of one rank of one job of an organisation until ``expires_at`` (seconds since the epoch), and nothing else.

    ``job`` names project, job and rank, and no checkpoint. The project is one of ``team``; None: as it is named to whoever has a
    token without a team.
    """

    organisation: str
    job: CheckpointUri
    expires_at: float
    team: str | None = None

    def allows(self, checkpoint: CheckpointUri) -> bool:
        """Whether it is one of this rank's."""
        return replace(checkpoint, checkpoint=None) == self.job


@dataclass(frozen=True, slots=True)
class FileGrant:
    """The right to read one file of a manifest of an organisation until ``expires_at`` (seconds since the epoch), and nothing else."""

    organisation: str
    manifest: Digest
    path: str
    expires_at: float

    def allows(self, manifest: Digest, path: str) -> bool:
        """Whether it is this file."""
        return (self.manifest, self.path) == (manifest, path)


@dataclass(frozen=True, slots=True)
class CacheGrant:
    """The right of a job to mount the training caches of a project and of its team in a cluster, by ids, until ``expires_at`` (seconds since the epoch).

    ``volume`` is the one that the caches lie on, by the id that is written on it.
    """

    organisation: str
    project: str
    team: str
    cluster: str
    volume: str
    expires_at: float

    def __post_init__(self) -> None:
        for name in (self.project, self.team):
            if not is_id(name):
                raise ValueError(f"{name!r} is no id")


def is_id(name: str) -> bool:
    """Whether it can be the id of a project or a team, and so the name of a directory."""
    return _ID.fullmatch(name) is not None


def file_url(base: str, grant: FileGrant, signature: str) -> str:
    """Where a mirror whose API is at ``base`` gives the file to whoever knows this address. It is a secret."""
    return f"{base.rstrip('/')}/files/{grant.manifest}/{quote(grant.path)}?sig={signature}"


def new_signing_key() -> bytes:
    """A fresh private key, PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name_of(public: dict[str, Any]) -> str:
    """What a key is called: a digest of it, so that one which was damaged on its way is known for that."""
    return digest_of(json.dumps(public, sort_keys=True).encode()).hex[:16]


def private_keys(pem: bytes) -> list[PrivateKeyTypes]:
    """One or more private keys, PEM, one after the other; text between them is passed over.

    Raises ``ValueError`` for anything else; its message goes on from the file's name and repeats nothing of the file.
    """
    blocks = [block[0] for block in _PEM.finditer(pem)]
    if len(blocks) != len(_BEGIN.findall(pem)):
        raise ValueError("holds a key that is cut off")
    if not blocks:
        raise ValueError("holds no private key in PEM")
    try:
        return [serialization.load_pem_private_key(block, password=None) for block in blocks]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("holds a key that cannot be read") from None


class GrantSigner:
    """Signs grants with the first of its private keys (PEM). ``ValueError`` says why there is none.

    ``public_keys`` verify what any of the keys has signed. They are in the order of their names, so that replicas which sign with
    different ones while keys are changed tell agents the same.
    """

    def __init__(self, pem: bytes) -> None:
        keys: dict[str, Ed25519PrivateKey] = {}
        published: dict[str, dict[str, Any]] = {}
        for key in private_keys(pem):
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError("holds a key that is not Ed25519")  # noqa: TRY004 - a wrong value, not a wrong type
            public = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
            key_id = _name_of(public)
            keys[key_id] = key
            published[key_id] = {**public, "kid": key_id, "alg": _ALGORITHM, "use": "sig"}
        self.key_id, self._key = next(iter(keys.items()))
        self.public_keys = [published[key_id] for key_id in sorted(published)]

    def sign(self, grant: Grant) -> str:
        """The token."""
        mounts = [[mount.mount_location, str(mount.manifest), mount.source] for mount in grant.mounts]
        return self._signed(AUDIENCE, grant.organisation, grant.expires_at, mounts=mounts, **_team(grant.team))

    def sign_push(self, grant: PushGrant) -> str:
        """The token. It is no grant to read, nor is one of those this."""
        job = str(grant.job)
        return self._signed(PUSH_AUDIENCE, grant.organisation, grant.expires_at, job=job, **_team(grant.team))

    def sign_file(self, grant: FileGrant) -> str:
        """The token, the ``sig`` of a file's address. It is no grant for manifests, nor is one of those this."""
        named = {"manifest": str(grant.manifest), "path": grant.path}
        return self._signed(FILE_AUDIENCE, grant.organisation, grant.expires_at, **named)

    def sign_cache(self, grant: CacheGrant) -> str:
        """The token. It opens nothing of the mirror's."""
        named = {"project": grant.project, "team": grant.team, "cluster": grant.cluster, "volume": grant.volume}
        return self._signed(CACHE_AUDIENCE, grant.organisation, grant.expires_at, **named)

    def _signed(self, audience: str, organisation: str, expires_at: float, **said: object) -> str:
        claims = {"iss": ISSUER, "aud": audience, "org": organisation, "exp": int(expires_at), **said}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM, headers={"kid": self.key_id})


def _team(team: str | None) -> dict[str, str]:
    return {} if team is None else {"team": team}


def _team_in(claims: dict[str, Any]) -> str | None:
    team = claims.get("team")
    return None if team is None else str(team)


class UnknownKeyError(GrantInvalidError):
    """The token is signed with a key that this verifier does not know; newer keys may be had from the mirror."""


class GrantVerifier:
    """Verifies tokens against public keys (JWK). A key that has not got its own name is a ``ValueError``.

    A token is verified once and remembered, because each request for a chunk brings one: verifying one with 256 mounts takes 4 ms.
    Safe for any thread.
    """

    def __init__(self, public_keys: Iterable[dict[str, Any]]) -> None:
        self.public_keys = list(public_keys)
        for key in self.public_keys:
            if key["kid"] != _name_of({part: key[part] for part in ("crv", "kty", "x")}):
                raise ValueError(f"{key['kid']} is not this key's name")
        self._keys = {str(key["kid"]): jwt.PyJWK(key) for key in self.public_keys}
        self._verified: dict[str, Grant] = {}
        self._mounts = 0
        self._lock = threading.Lock()

    def verify(self, token: str, *, now: float) -> Grant:
        """The grant, when it is signed by a known key and not expired at ``now`` (seconds since the epoch).

        Raises:
            UnknownKeyError: signed with another key.
            GrantInvalidError: not a grant, or altered.
            GrantExpiredError: its time is over.
        """
        grant = self._verified.get(token) or self._verify(token)
        if grant.expires_at <= now:
            raise GrantExpiredError(datetime.fromtimestamp(grant.expires_at, UTC).isoformat())
        self._remember(token, grant)
        return grant

    def _remember(self, token: str, grant: Grant) -> None:
        """Those that were verified first are forgotten first: a grant that is in use is soon verified again."""
        if token in self._verified:
            return
        with self._lock:
            if self._verified.setdefault(token, grant) is grant:
                self._mounts += 1 + len(grant.mounts)
            while self._mounts > _REMEMBERED_MOUNTS:
                self._mounts -= 1 + len(self._verified.pop(next(iter(self._verified))).mounts)

    def _verify(self, token: str) -> Grant:
        claims = self._claims(token, AUDIENCE, "mounts")
        try:
            mounts = tuple(
                GrantedMount(place, Digest.parse(manifest), source) for place, manifest, source in claims["mounts"]
            )
            return Grant(str(claims["org"]), mounts, float(claims["exp"]), _team_in(claims))
        except (ValueError, TypeError) as error:
            raise GrantInvalidError(str(error) or type(error).__name__) from error

    def verify_push(self, token: str, *, now: float) -> PushGrant:
        """The grant to push, as ``verify`` does. It is short, and verified each time."""
        claims = self._claims(token, PUSH_AUDIENCE, "job")
        try:
            job = parse_source(str(claims["job"]))
        except InvalidSourceError as error:
            raise GrantInvalidError(str(error)) from error
        if not isinstance(job, CheckpointUri):
            raise GrantInvalidError("it names no job")
        if now >= (expires_at := float(claims["exp"])):
            raise GrantExpiredError(datetime.fromtimestamp(expires_at, UTC).isoformat())
        return PushGrant(str(claims["org"]), job, expires_at, _team_in(claims))

    def verify_file(self, token: str, *, now: float) -> FileGrant:
        """The grant for one file, as ``verify`` does. It is short, and verified each time."""
        claims = self._claims(token, FILE_AUDIENCE, "manifest", "path")
        try:
            grant = FileGrant(
                str(claims["org"]), Digest.parse(str(claims["manifest"])), str(claims["path"]), float(claims["exp"])
            )
        except (ValueError, TypeError) as error:
            raise GrantInvalidError(str(error) or type(error).__name__) from error
        if now >= grant.expires_at:
            raise GrantExpiredError(datetime.fromtimestamp(grant.expires_at, UTC).isoformat())
        return grant

    def verify_cache(self, token: str, *, now: float) -> CacheGrant:
        """The grant for training caches, as ``verify`` does. It is short, and verified each time."""
        claims = self._claims(token, CACHE_AUDIENCE, "project", "team", "cluster", "volume")
        try:
            named = {name: str(claims[name]) for name in ("project", "team", "cluster", "volume")}
            grant = CacheGrant(organisation=str(claims["org"]), **named, expires_at=float(claims["exp"]))
        except (ValueError, TypeError) as error:
            raise GrantInvalidError(str(error) or type(error).__name__) from error
        if now >= grant.expires_at:
            raise GrantExpiredError(datetime.fromtimestamp(grant.expires_at, UTC).isoformat())
        return grant

    def _claims(self, token: str, audience: str, *says: str) -> dict[str, Any]:
        try:
            key_id = jwt.get_unverified_header(token).get("kid", "")
            if key_id not in self._keys:
                raise UnknownKeyError(
                    "it is signed with a key that is not known here: another mirror's, or one that was removed; read the mirror "
                    "again for a fresh grant"
                )
            return jwt.decode(
                token,
                self._keys[key_id],
                algorithms=[_ALGORITHM],
                audience=audience,
                issuer=ISSUER,
                options={"require": ["exp", "org", *says], "verify_exp": False},
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise GrantInvalidError(str(error) or type(error).__name__) from error
