"""The ways to sign in to a source, and the form of a secret for each upstream.

No error, repr or log contains a value of a secret. ARNs, regions and e-mail addresses come from users and become parts
of host names and paths, so constructors reject malformed ones.
"""

from __future__ import annotations

import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.core.source.upstream import ASK_ONCE, Asker
from bdn.sources.settings import S3Credentials, UpstreamSettings
from bdn.wire.shapes import json_object


@dataclass(frozen=True, slots=True)
class Secret:
    name: str
    value: str = field(repr=False)


def hugging_face_token(secret: Secret) -> str:
    """The plain token, without surrounding white space: files end with a newline.

    Raises ``SecretMalformedError``: empty, or not one printable word, which a header could not contain.
    """
    token = secret.value.strip()
    if not token:
        raise SecretMalformedError(secret.name, "is empty; it should be a plain Hugging Face token (hf_…)")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SecretMalformedError(secret.name, "is not a plain Hugging Face token (hf_…), without quotes or JSON")
    return token


def http_authorization(secret: Secret) -> str:
    """The value of an ``Authorization`` header, from ``{"bearer_token": …}`` or ``{"username": …, "password": …}``.

    Raises ``SecretMalformedError``: not a JSON object, a key is missing, or the token is not one printable word.
    """
    document = _json_object(secret, '{"bearer_token": …} or {"username": …, "password": …}')
    if "bearer_token" in document:
        token = _required(secret, document, "bearer_token").strip()
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise SecretMalformedError(secret.name, 'has a "bearer_token" that is not one printable word')
        return f"Bearer {token}"
    pair = f"{_required(secret, document, 'username')}:{_required(secret, document, 'password')}"
    return f"Basic {b64encode(pair.encode()).decode()}"


@dataclass(frozen=True, slots=True)
class AzureSecret:
    """Either the key of a storage account, or a SAS token, without its question mark."""

    account_key: bytes | None = field(default=None, repr=False)
    sas_token: str = field(default="", repr=False)


def azure_secret(secret: Secret) -> AzureSecret:
    """From ``{"account_key": …}`` or ``{"sas_token": …}``.

    Raises ``SecretMalformedError``: not a JSON object, no key, or a value that cannot be one.
    """
    document = _json_object(secret, '{"account_key": …} or {"sas_token": …}')
    if "sas_token" in document:
        token = _required(secret, document, "sas_token").strip().removeprefix("?")
        if not re.fullmatch(r"[!-~]+", token) or "sig=" not in token or "#" in token:
            raise SecretMalformedError(secret.name, 'has a "sas_token" that is not one, such as sv=…&sig=…')
        return AzureSecret(sas_token=token)
    try:
        return AzureSecret(b64decode(_required(secret, document, "account_key"), validate=True))
    except ValueError:
        raise SecretMalformedError(secret.name, 'has an "account_key" that is not base64') from None


def s3_credentials(secret: Secret) -> S3Credentials:
    """From the JSON of docs/contract.md, or with the older key names, without ``aws_``.

    Raises ``SecretMalformedError``: not a JSON object, or a key is missing, which the error names.
    """
    document = _json_object(
        secret,
        '{"aws_access_key_id": …, "aws_secret_access_key": …, "aws_region": …, "aws_session_token": …}, '
        "the last two optional",
    )
    return S3Credentials(
        _required(secret, document, "aws_access_key_id", "access_key_id"),
        _required(secret, document, "aws_secret_access_key", "secret_access_key"),
        _text(secret, document, "aws_session_token", "session_token"),
        _text(secret, document, "aws_region", "region"),
    )


@dataclass(frozen=True, slots=True)
class ServiceAccountKey:
    """The used fields of a Google service account's JSON. ``token_url`` is None if the JSON does not name one."""

    client_email: str
    private_key: str = field(repr=False)
    private_key_id: str
    token_url: str | None = None


def service_account_key(secret: Secret) -> ServiceAccountKey:
    """From the JSON that Google's console issues, or its short form: email, private key and its id.

    All other members are ignored: a user's JSON may set the identity and the token address, nothing else.

    Raises ``SecretMalformedError``: not a JSON object, another kind of account, or a key is missing, which the error
    names.
    """
    document = _json_object(
        secret,
        'the key of a Google service account: {"type": "service_account", "client_email": …, "private_key": …, '
        '"private_key_id": …, "token_uri": …}',
    )
    if document.get("type", "service_account") != "service_account":
        raise SecretMalformedError(secret.name, 'has a "type" other than "service_account"')
    return ServiceAccountKey(
        _required(secret, document, "client_email"),
        _required(secret, document, "private_key"),
        _required(secret, document, "private_key_id"),
        _required(secret, document, "token_uri") if "token_uri" in document else None,
    )


def _json_object(secret: Secret, expected: str) -> dict[str, object]:
    document = json_object(secret.value)
    if document is None:
        raise SecretMalformedError(secret.name, f"is not a JSON object; it should be {expected}")
    return document


def _text(secret: Secret, document: Mapping[str, object], *names: str) -> str | None:
    """The member of the first of these names that is present."""
    value = next((document[name] for name in names if name in document), None)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise SecretMalformedError(secret.name, f'has the key "{names[0]}" with a value that is not a string')
    return value


def _required(secret: Secret, document: Mapping[str, object], *names: str) -> str:
    value = _text(secret, document, *names)
    if value is None:
        raise SecretMalformedError(secret.name, f'lacks the key "{names[0]}"')
    return value


AWS_AUDIENCE: Final = "sts.amazonaws.com"

_REGION: Final = re.compile(r"[a-z]{2,5}(-[a-z]{2,12}){1,3}-[0-9]{1,2}")  # us-east-1, us-gov-west-1, eusc-de-east-1
# IAM user guide, "IAM identifiers": a path of up to 512 characters and a name of up to 64.
_ROLE: Final = re.compile(r"arn:aws[a-z-]{0,20}:iam::([0-9]{12}):role/([\x21-\x7e]{1,510}/)?[A-Za-z0-9_+=,.@-]{1,64}")
_SERVICE_ACCOUNT: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}@([a-z0-9-]{1,63}\.){1,8}gserviceaccount\.com")
_PROVIDER: Final = re.compile(
    r"(?:(?:https:)?//iam\.googleapis\.com/)?"
    r"(projects/[0-9]{1,20}/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}/providers/[a-z0-9-]{4,32})"
)


@dataclass(frozen=True, slots=True)
class Assertion:
    """Makes signed identity tokens of this mirror. ``issuer`` and ``subjects`` are for messages.

    ``subjects`` is the pattern of all subjects of the organisation, as a trust policy would name it.
    """

    sign: Callable[[str], str] = field(repr=False)  # from an audience to a new token
    issuer: str
    subjects: str


@dataclass(frozen=True, slots=True)
class AwsRole:
    """A role in a user's AWS account; ``session_name`` appears in the user's CloudTrail."""

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
        return self.arn.split(":")[4]

    def provider_arn(self, issuer: str) -> str:
        return f"{self.arn.partition(':role/')[0]}:oidc-provider/{issuer.removeprefix('https://')}"


@dataclass(frozen=True, slots=True)
class AwsWebIdentity:
    """AWS_OIDC: the role is assumed with an identity token of this mirror."""

    role: AwsRole
    assertion: Assertion


@dataclass(frozen=True, slots=True)
class AwsAssumedRole:
    """AWS_ASSUME_ROLE: the role is assumed with this mirror's own AWS keys. ``external_id`` is per organisation."""

    role: AwsRole
    external_id: str


@dataclass(frozen=True, slots=True)
class GoogleServiceAccount:
    """GCP_OIDC: exchanges this mirror's identity token for a federated token, and that for the service account's."""

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
        """The audience of the request to the token service."""
        return f"//iam.googleapis.com/{self.provider}"

    @property
    def token_audience(self) -> str:
        """The audience that a provider accepts in a token unless its owner configured others."""
        return f"https://iam.googleapis.com/{self.provider}"


SignIn = Secret | AwsWebIdentity | AwsAssumedRole | GoogleServiceAccount


@dataclass(frozen=True, slots=True)
class SourceContext:
    """How to open a source.

    ``reader`` is the organisation or team of the request (``reader_of``); private content is not reused for other
    readers. ``sign_in`` is already resolved; without one the source is read with the process's own credentials
    (``ambient_credentials``) or anonymously. ``clock`` (seconds since the epoch) is for credentials that expire.
    ``asker`` sends every request.
    """

    reader: str
    settings: UpstreamSettings
    sign_in: SignIn | None = None
    ambient_credentials: bool = False
    clock: Callable[[], float] = time.time
    asker: Asker = ASK_ONCE
