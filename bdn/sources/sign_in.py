"""The ways to sign in to a source, resolved: what a request's ``auth`` has become once names and tokens are at hand.

ARNs, regions and e-mail addresses come from users and become parts of host names and paths, so a value that does not
look like one refuses to exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.sources.credentials import Secret

AWS_AUDIENCE: Final = "sts.amazonaws.com"

_REGION: Final = re.compile(r"[a-z]{2,5}(-[a-z]{2,12}){1,3}-[0-9]{1,2}")  # us-east-1, us-gov-west-1, eusc-de-east-1
# IAM user guide, "IAM identifiers": a path of up to 512 signs and a name of up to 64.
_ROLE: Final = re.compile(r"arn:aws[a-z-]{0,20}:iam::([0-9]{12}):role/([\x21-\x7e]{1,510}/)?[A-Za-z0-9_+=,.@-]{1,64}")
_SERVICE_ACCOUNT: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}@([a-z0-9-]{1,63}\.){1,8}gserviceaccount\.com")
_PROVIDER: Final = re.compile(
    r"(?:(?:https:)?//iam\.googleapis\.com/)?"
    r"(projects/[0-9]{1,20}/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}/providers/[a-z0-9-]{4,32})"
)


@dataclass(frozen=True, slots=True)
class Assertion:
    """This mirror's word for who asks: makes signed identity tokens. ``issuer`` and ``subjects`` are for messages.

    ``subjects`` is the pattern of all subjects of the organisation, as a trust policy would name it.
    """

    sign: Callable[[str], str] = field(repr=False)  # from an audience to a fresh token
    issuer: str
    subjects: str


@dataclass(frozen=True, slots=True)
class AwsRole:
    """A role in a user's AWS account, and the name that its use has in their CloudTrail."""

    arn: str
    region: str
    session_name: str

    def __post_init__(self) -> None:
        if not _ROLE.fullmatch(self.arn):
            raise InvalidRequestError(
                f"{self.arn[:200]!r} is not the ARN of a role; it should look like arn:aws:iam::123456789012:role/NAME"
            )
        if not _REGION.fullmatch(self.region):
            raise InvalidRequestError(f"{self.region[:200]!r} is not a region of AWS; it should look like us-east-1")

    @property
    def account(self) -> str:
        """The number of the account that the role belongs to."""
        return self.arn.split(":")[4]

    def provider_arn(self, issuer: str) -> str:
        """What an OpenID provider of the role's account is called."""
        return f"{self.arn.partition(':role/')[0]}:oidc-provider/{issuer.removeprefix('https://')}"


@dataclass(frozen=True, slots=True)
class AwsWebIdentity:
    """AWS_OIDC: the role is taken with an identity token of this mirror."""

    role: AwsRole
    assertion: Assertion


@dataclass(frozen=True, slots=True)
class AwsAssumedRole:
    """AWS_ASSUME_ROLE: the role is taken with this mirror's own AWS keys. ``external_id`` is the organisation's own."""

    role: AwsRole
    external_id: str


@dataclass(frozen=True, slots=True)
class GoogleServiceAccount:
    """GCP_OIDC: an identity token of this mirror becomes a federated token, and that one the service account's."""

    email: str
    provider: str  # projects/…/providers/…, without a host
    assertion: Assertion

    @classmethod
    def of(cls, email: str, provider: str, assertion: Assertion) -> GoogleServiceAccount:
        """From the fields of a request; the provider's name may begin with ``//iam.googleapis.com/``."""
        found = _PROVIDER.fullmatch(provider)
        if not found:
            raise InvalidRequestError(
                f"{provider[:300]!r} is not a workload identity provider; it should look like "
                "projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/PROVIDER"
            )
        return cls(email, found[1], assertion)

    def __post_init__(self) -> None:
        if not _SERVICE_ACCOUNT.fullmatch(self.email):
            raise InvalidRequestError(
                f"{self.email[:200]!r} is not a service account; it should look like NAME@PROJECT.iam.gserviceaccount.com"
            )

    @property
    def audience(self) -> str:
        """What the token service is asked for."""
        return f"//iam.googleapis.com/{self.provider}"

    @property
    def token_audience(self) -> str:
        """What a provider takes for its own name in a token, where its owner has not set other audiences."""
        return f"https://iam.googleapis.com/{self.provider}"


SignIn = Secret | AwsWebIdentity | AwsAssumedRole | GoogleServiceAccount
