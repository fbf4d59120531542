"""What a job asks for: sources, where their files shall stand, which files, and with whose credentials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from bdn.core.errors import InvalidMountError, InvalidRequestError
from bdn.core.source.patterns import EVERYTHING, Patterns
from bdn.core.source.uri import SourceUri


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
