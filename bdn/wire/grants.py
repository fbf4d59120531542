"""Grants: what a job's agents may read, and where to mount it. JWTs (Ed25519), which agents verify offline."""

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Self, TypeVar
from urllib.parse import quote

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import OKPAlgorithm

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import BdnError, GrantExpiredError, GrantInvalidError
from bdn.core.source.uri import (
    COMMIT,
    CheckpointUri,
    HuggingFaceUri,
    SourceUri,
    check_mounts,
    normalise_mount,
    parse_source,
)
from bdn.core.store import reader_of

LONGEST_GRANT: Final = 60 * 1024  # bytes: with 4 KiB for everything else it fits into the head of a request
ISSUER: Final = "bdn-mirror"
_ALGORITHM: Final = "EdDSA"  # RFC 8037
_HUB: Final = "hf://"
_BEGIN: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_PEM: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.+?-----END \1-----", re.DOTALL)
_ID: Final = re.compile(r"[a-z0-9]{10}")
_MIRROR: Final = re.compile(r"mir_[0-9a-f]{24}")
_REMEMBERED_MOUNTS: Final = 32_768  # over all grants that a verifier caches, and one for each grant; about 20 MB


@dataclass(frozen=True, slots=True)
class GrantedMount:
    """One manifest and the mount location of its files.

    ``source`` is what was requested, ``commit`` what it was then; None if the source is not a repository of a hub.
    """

    mount_location: str
    manifest: Digest
    source: str
    commit: str | None = None

    @classmethod
    def at(cls, mount_location: str, manifest: Digest, source: str, revision: str | None) -> Self:
        """A mount of a source that was resolved to ``revision``."""
        is_commit = source.startswith(_HUB) and revision is not None and COMMIT.fullmatch(revision)
        return cls(mount_location, manifest, source, revision if is_commit else None)

    def __post_init__(self) -> None:
        if normalise_mount(self.mount_location) != self.mount_location:
            raise ValueError(f"mount_location {self.mount_location!r} is not normalised")
        if self.commit is not None and not COMMIT.fullmatch(self.commit):
            raise ValueError(f"{self.commit!r} is not a commit")


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of an organisation's job to read these manifests until ``expires_at`` (seconds since the epoch).

    The grant of a job without weights has no mounts. ``team`` is the team that mirrored them; None: the organisation
    did. ``mirror_id`` is the mirror that they are of; None: of no single one, or the grant was signed by an older mirror.
    """

    audience: ClassVar = "bdn-agent"
    organisation: str
    mounts: tuple[GrantedMount, ...]
    expires_at: float
    team: str | None = None
    mirror_id: str | None = None

    def __post_init__(self) -> None:
        if self.mirror_id is not None and not _MIRROR.fullmatch(self.mirror_id):
            raise ValueError(f"{self.mirror_id!r} is not the id of a mirror")
        check_mounts([mount.mount_location for mount in self.mounts])

    def claims(self) -> dict[str, object]:
        mounts = [[mount.mount_location, str(mount.manifest), mount.source] for mount in self.mounts]
        commits = [mount.commit for mount in self.mounts]
        # A claim of its own: agents older than it ignore it.
        known = {"team": self.team, "mirror": self.mirror_id}
        return {"mounts": mounts, "commits": commits if any(commits) else None, **known}

    @classmethod
    def of(cls, organisation: str, expires_at: float, claims: dict[str, Any]) -> Self:
        commits = claims.get("commits") or [None] * len(claims["mounts"])
        mounts = tuple(
            GrantedMount(place, Digest.parse(manifest), source, commit)
            for (place, manifest, source), commit in zip(claims["mounts"], commits, strict=True)
        )
        return cls(organisation, mounts, expires_at, claims.get("team"), claims.get("mirror"))

    @property
    def reader(self) -> str:
        """The organisation or team whose slabs the grant opens."""
        return reader_of(self.organisation, self.team)

    def allows(self, manifest: Digest) -> bool:
        return any(mount.manifest == manifest for mount in self.mounts)

    def names(self, source: SourceUri) -> bool:
        """Whether a mount is of this commit of this repository."""
        if not isinstance(source, HuggingFaceUri) or source.commit is None:
            return False
        wanted = str(replace(source, revision=None)), source.commit
        return any((mount.source.partition("@")[0], mount.commit) == wanted for mount in self.mounts)


@dataclass(frozen=True, slots=True)
class PushGrant:
    """The right to push checkpoints of one rank of one job, and nothing else, until ``expires_at`` (epoch seconds).

    ``job`` names project, job and rank, without a checkpoint. ``team`` owns the project; None: the project is the one
    of this name for tokens without a team.
    """

    audience: ClassVar = "bdn-push"
    organisation: str
    job: CheckpointUri
    expires_at: float
    team: str | None = None

    def claims(self) -> dict[str, object]:
        return {"job": str(self.job), "team": self.team}

    @classmethod
    def of(cls, organisation: str, expires_at: float, claims: dict[str, Any]) -> Self:
        job = parse_source(str(claims["job"]))
        if not isinstance(job, CheckpointUri):
            raise GrantInvalidError("it names no job")
        return cls(organisation, job, expires_at, claims.get("team"))

    def allows(self, checkpoint: CheckpointUri) -> bool:
        return replace(checkpoint, checkpoint=None) == self.job


@dataclass(frozen=True, slots=True)
class FileGrant:
    """The right to read one file of a manifest until ``expires_at`` (seconds since the epoch), and nothing else."""

    audience: ClassVar = "bdn-file"
    organisation: str
    manifest: Digest
    path: str
    expires_at: float

    def claims(self) -> dict[str, object]:
        return {"manifest": str(self.manifest), "path": self.path}

    @classmethod
    def of(cls, organisation: str, expires_at: float, claims: dict[str, Any]) -> Self:
        return cls(organisation, Digest.parse(str(claims["manifest"])), str(claims["path"]), expires_at)

    def allows(self, manifest: Digest, path: str) -> bool:
        return (self.manifest, self.path) == (manifest, path)


@dataclass(frozen=True, slots=True)
class UploadGrant:
    """The right to upload one object under ``key`` until ``expires_at`` (seconds since the epoch), and nothing else."""

    audience: ClassVar = "bdn-upload"
    organisation: str
    key: str
    expires_at: float

    def claims(self) -> dict[str, object]:
        return {"key": self.key}

    @classmethod
    def of(cls, organisation: str, expires_at: float, claims: dict[str, Any]) -> Self:
        return cls(organisation, str(claims["key"]), expires_at)


@dataclass(frozen=True, slots=True)
class CacheGrant:
    """The right of a job to mount a project's and its team's caches in a cluster until ``expires_at`` (epoch seconds).

    ``project`` and ``team`` are ids. ``volume`` is the id of the volume with the caches, as written on it.
    """

    audience: ClassVar = "bdn-cache"
    organisation: str
    project: str
    team: str
    cluster: str
    volume: str
    expires_at: float

    def __post_init__(self) -> None:
        for name in (self.project, self.team):
            if not is_id(name):
                raise ValueError(f"{name!r} is not an id")

    def claims(self) -> dict[str, object]:
        return {"project": self.project, "team": self.team, "cluster": self.cluster, "volume": self.volume}

    @classmethod
    def of(cls, organisation: str, expires_at: float, claims: dict[str, Any]) -> Self:
        named = {name: str(claims[name]) for name in ("project", "team", "cluster", "volume")}
        return cls(organisation=organisation, **named, expires_at=expires_at)


_Kind = TypeVar("_Kind", Grant, PushGrant, FileGrant, UploadGrant, CacheGrant)


def is_id(name: str) -> bool:
    """Whether the name is valid as the id of a project or a team, and so as the name of a directory."""
    return _ID.fullmatch(name) is not None


def file_url(base: str, grant: FileGrant, signature: str) -> str:
    """The address at which a mirror with its API at ``base`` serves the file to any client. It is a secret."""
    return f"{base.rstrip('/')}/files/{grant.manifest}/{quote(grant.path)}?sig={signature}"


def new_signing_key() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name_of(public: dict[str, Any]) -> str:
    """The key's id: a digest of it, so that a key damaged in transit is detected."""
    return digest_of(json.dumps(public, sort_keys=True).encode()).hex[:16]


def private_keys(pem: bytes) -> list[PrivateKeyTypes]:
    """One or more private keys in PEM, one after the other; text between them is ignored.

    Raises ``ValueError`` for anything else. The message continues a sentence that begins with the file's name, and
    repeats nothing of the file.
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
    """Signs grants with the first of its private keys (PEM). Raises ``ValueError`` with the reason if there is none.

    ``public_keys`` verify the signatures of all keys. They are sorted by id, so that replicas which sign with different
    keys during a rotation publish the same list.
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

    def sign(self, grant: _Kind) -> str:
        """The token. A token of one kind of grant is not valid as another kind."""
        said = {name: value for name, value in grant.claims().items() if value is not None}
        claims = {"iss": ISSUER, "aud": grant.audience, "org": grant.organisation, "exp": int(grant.expires_at), **said}
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM, headers={"kid": self.key_id})


class UnknownKeyError(GrantInvalidError):
    """The signing key is unknown to this verifier; the mirror may have newer keys."""


class GrantVerifier:
    """Verifies tokens against public keys (JWK). Raises ``ValueError`` for a key whose id is not its digest.

    A verified token is cached, because each request for a chunk contains one: verifying one with 256 mounts takes 4 ms.
    Thread-safe.
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
        """The grant to read, if it is signed by a known key and not expired at ``now`` (seconds since the epoch).

        Raises:
            UnknownKeyError: signed with another key.
            GrantInvalidError: not a grant, or altered.
            GrantExpiredError: expired.
        """
        grant = _unexpired(self._verified.get(token) or self._read(Grant, token), now)
        self._remember(token, grant)
        return grant

    def verify_as(self, kind: type[_Kind], token: str, *, now: float) -> _Kind:
        """A grant of this kind. Raises like ``verify``. Not cached."""
        return _unexpired(self._read(kind, token), now)

    def _remember(self, token: str, grant: Grant) -> None:
        """Evicts the tokens that were verified first: a token in use is soon verified again."""
        if token in self._verified:
            return
        with self._lock:
            if self._verified.setdefault(token, grant) is grant:
                self._mounts += 1 + len(grant.mounts)
            while self._mounts > _REMEMBERED_MOUNTS:
                self._mounts -= 1 + len(self._verified.pop(next(iter(self._verified))).mounts)

    def _read(self, kind: type[_Kind], token: str) -> _Kind:
        try:
            key_id = jwt.get_unverified_header(token).get("kid", "")
            if key_id not in self._keys:
                raise UnknownKeyError(
                    "it is signed with a key that is not known here: another mirror's, or one that was removed; read the mirror "
                    "again for a fresh grant"
                )
            claims = jwt.decode(
                token,
                self._keys[key_id],
                algorithms=[_ALGORITHM],
                audience=kind.audience,
                issuer=ISSUER,
                options={"require": ["exp", "org"], "verify_exp": False},
            )
            return kind.of(str(claims["org"]), float(claims["exp"]), claims)
        except GrantInvalidError:
            raise
        except KeyError as error:
            raise GrantInvalidError(f"it has no claim {error}") from error
        except (jwt.PyJWTError, BdnError, ValueError, TypeError) as error:
            raise GrantInvalidError(str(error) or type(error).__name__) from error


def _unexpired(grant: _Kind, now: float) -> _Kind:
    if grant.expires_at <= now:
        raise GrantExpiredError(datetime.fromtimestamp(grant.expires_at, UTC).isoformat())
    return grant
