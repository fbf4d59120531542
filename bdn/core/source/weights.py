"""What a job asks for: sources, where their files shall stand, which files, and with whose credentials.

The messages follow ``truss`` where it has one, so that a user of both reads one language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import ClassVar, Final, Literal, get_args

from bdn.core.errors import InvalidMountError, InvalidRequestError, InvalidSourceError
from bdn.core.source.patterns import EVERYTHING, Patterns


class AuthMethod(StrEnum):
    """The ways to sign in, named as in ``truss``."""

    CUSTOM_SECRET = "CUSTOM_SECRET"  # noqa: S105 - a method's name, not a secret
    AWS_OIDC = "AWS_OIDC"
    GCP_OIDC = "GCP_OIDC"
    AWS_ASSUME_ROLE = "AWS_ASSUME_ROLE"


REQUIRED_FIELDS: Final[dict[AuthMethod, tuple[str, ...]]] = {
    AuthMethod.CUSTOM_SECRET: ("auth_secret_name",),
    AuthMethod.AWS_OIDC: ("aws_oidc_role_arn", "aws_oidc_region"),
    AuthMethod.GCP_OIDC: ("gcp_oidc_service_account", "gcp_oidc_workload_id_provider"),
    AuthMethod.AWS_ASSUME_ROLE: ("aws_assume_role_arn", "aws_assume_role_region"),
}
FITTING_SCHEMES: Final[dict[AuthMethod, tuple[str, ...]]] = {
    AuthMethod.CUSTOM_SECRET: ("gs", "hf", "r2", "s3"),
    AuthMethod.AWS_OIDC: ("s3",),
    AuthMethod.GCP_OIDC: ("gs",),
    AuthMethod.AWS_ASSUME_ROLE: ("s3",),
}


@dataclass(frozen=True, slots=True)
class Auth:
    """A method with exactly its own fields; ``fields`` maps each field's name to its non-empty value."""

    method: AuthMethod
    fields: dict[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        required = REQUIRED_FIELDS[self.method]
        if missing := [name for name in required if not self.fields.get(name)]:
            msg = f"{', '.join(missing)} must be provided when auth_method is {self.method}"
            raise InvalidRequestError(msg)
        if extra := [name for name in self.fields if name not in required]:
            msg = f"{', '.join(extra)} cannot be specified when auth_method is {self.method}"
            raise InvalidRequestError(msg)

    @property
    def secret_name(self) -> str | None:
        """The secret to resolve, for CUSTOM_SECRET."""
        return self.fields.get("auth_secret_name")

    def check_scheme(self, scheme: str) -> None:
        """Refuse a method that cannot open sources of this scheme."""
        if scheme not in FITTING_SCHEMES[self.method]:
            msg = f"auth_method {self.method} does not fit {scheme}:// sources"
            raise InvalidRequestError(msg)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """One source of a request. ``mount_location`` is normalised."""

    source: SourceUri
    mount_location: str
    patterns: Patterns = EVERYTHING
    auth: Auth | None = None

    def __post_init__(self) -> None:
        if normalise_mount(self.mount_location) != self.mount_location:
            raise InvalidMountError(self.mount_location, "is not normalised")
        if self.auth:
            self.auth.check_scheme(self.source.scheme)


def normalise_mount(location: str) -> str:
    """An absolute path without empty or ``.`` segments and without a trailing slash.

    Raises:
        InvalidMountError: relative, the root, or with ``..`` or NUL.
    """
    if not location.startswith("/"):
        raise InvalidMountError(location, "must be an absolute path (start with /)")
    if "\0" in location or ".." in location.split("/"):
        raise InvalidMountError(location, "must not hold NUL or '..'")
    segments = [segment for segment in location.split("/") if segment not in ("", ".")]
    if not segments:
        raise InvalidMountError(location, "must not be the root directory")
    if any(len(segment.encode("utf-8", "surrogatepass")) > 255 for segment in segments):
        raise InvalidMountError(location, "has a segment of more than 255 bytes")
    return "/" + "/".join(segments)


def check_mounts(locations: Sequence[str]) -> None:
    """Refuse mounts of one request that are equal or nested.

    Raises:
        InvalidMountError: naming the second of the pair.
    """
    for first, second in pairwise(sorted(locations, key=lambda location: location.split("/"))):
        if first == second:
            raise InvalidMountError(second, "stands twice; each source needs a mount location of its own")
        if second.startswith(f"{first}/"):
            raise InvalidMountError(second, f"lies inside {first!r}, another mount of this request")


Scheme = Literal["gs", "hf", "r2", "s3"]
SCHEMES: Final = get_args(Scheme)
_SUPPORTED: Final = ", ".join(f"{scheme}://" for scheme in SCHEMES)
_USER_AND_COLON: Final = re.compile(r"://[^/@:]*:")
_USER_INFO: Final = re.compile(r"://[^/]*@")
_REPO_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_R2_AUTHORITY: Final = re.compile(r"([A-Za-z0-9-]+)\.(?:([a-z]+)\.)?([a-z0-9][a-z0-9-]+)")

RepoKind = Literal["model", "dataset", "space"]


@dataclass(frozen=True, slots=True)
class HuggingFaceUri:
    """A repository of the hub. ``revision`` is a branch, tag, commit or ``refs/pr/N``; None means the default branch."""

    kind: RepoKind
    repo_id: str
    revision: str | None

    scheme: ClassVar[Literal["hf"]] = "hf"

    def __str__(self) -> str:
        kind = "" if self.kind == "model" else f"{self.kind}s/"
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf://{kind}{self.repo_id}{revision}"


@dataclass(frozen=True, slots=True)
class BucketUri:
    """A folder of a bucket, the whole bucket, or one object.

    ``prefix`` is the rest of the URI as written: ``""`` is the whole bucket, a trailing ``/`` says folder, anything else
    names a folder or exactly one object, which only a listing can tell.
    """

    scheme: Literal["s3", "gs", "r2"]
    bucket: str
    prefix: str
    account: str = ""  # r2 only
    jurisdiction: str = ""  # r2 only, "" is the default one

    def __str__(self) -> str:
        account = f"{self.account}." if self.account else ""
        jurisdiction = f"{self.jurisdiction}." if self.jurisdiction else ""
        prefix = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{account}{jurisdiction}{self.bucket}{prefix}"


SourceUri = HuggingFaceUri | BucketUri


def parse_source(text: str) -> SourceUri:
    """Read a source URI.

    Raises:
        InvalidSourceError: with the reason; credentials inside the URI are refused without repeating them.
    """
    if (shown := _without_credentials(text)) != text:
        raise InvalidSourceError(
            shown, "credentials do not belong in a source URI; store them as a secret and name it in auth"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        user, colon, password = text.partition(":")
        shown = f"{user}{colon}***@{password.rpartition('@')[2]}" if "@" in password else text
        raise InvalidSourceError(shown, f"Source {shown!r} is missing a URI scheme. Supported schemes: {_SUPPORTED}")
    if scheme not in SCHEMES:
        shown = _USER_INFO.sub("://***@", text).partition("?")[0]  # a pasted URL may hold a token or a signature
        raise InvalidSourceError(
            shown, f"Unsupported source scheme '{scheme}://' in {shown!r}. Supported schemes: {_SUPPORTED}"
        )
    if any(character < " " or character == "\x7f" for character in text):
        raise InvalidSourceError(ascii(text), "control characters do not belong in a source URI")
    if ".." in re.split(r"[/@]", rest):
        raise InvalidSourceError(text, f"Source {text!r} has a '..' segment")
    return _parse_hugging_face(text, rest) if scheme == "hf" else _parse_bucket(text, scheme, rest)


def _without_credentials(text: str) -> str:
    """User and password are taken for as long as they can be: an AWS key may itself hold ``/``, a password ``@``.

    Each character is looked at a few times, whatever the text is: somebody waits for the refusal.
    """
    found, end = _USER_AND_COLON.search(text), text.rfind("@")
    return f"{text[: found.start()]}://***@{text[end + 1 :]}" if found and found.end() <= end else text


def _parse_hugging_face(text: str, rest: str) -> HuggingFaceUri:
    name, at, revision = rest.partition("@")
    if at and not revision:
        raise InvalidSourceError(
            text, f"Source {text!r} has an empty revision after '@'; leave the '@' away for the default branch"
        )
    kind: RepoKind = "model"
    segments = name.split("/")
    if segments[0] in ("datasets", "spaces"):
        kind = "dataset" if segments[0] == "datasets" else "space"
        segments = segments[1:]
    if len(segments) != 2 or not all(_REPO_NAME.fullmatch(segment) for segment in segments):
        raise InvalidSourceError(
            text,
            f"Invalid HuggingFace URI format: {text!r}. Expected format: hf://owner/repo[@revision], "
            "hf://datasets/owner/repo or hf://spaces/owner/repo",
        )
    return HuggingFaceUri(kind, "/".join(segments), revision or None)


def _parse_bucket(text: str, scheme: str, rest: str) -> BucketUri:
    name = scheme.upper()
    if "@" in rest:
        raise InvalidSourceError(
            text,
            f"The @ revision syntax is only valid for HuggingFace sources (hf://). "
            f"Source {text!r} uses {name} which does not support revisions.",
        )
    authority, _, prefix = rest.partition("/")
    if scheme == "r2":
        match = _R2_AUTHORITY.fullmatch(authority)
        if not match:
            raise InvalidSourceError(
                text, f"Invalid R2 URI format: {text!r}. Expected format: r2://account_id[.jurisdiction].bucket[/path]"
            )
        return BucketUri("r2", match[3], prefix, match[1], match[2] or "")
    if not _BUCKET.fullmatch(authority):
        raise InvalidSourceError(
            text, f"Invalid {name} URI format: {text!r}. Expected format: {scheme}://bucket[/path]"
        )
    return BucketUri("gs" if scheme == "gs" else "s3", authority, prefix)
