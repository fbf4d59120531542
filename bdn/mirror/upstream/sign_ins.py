"""Resolves a request's ``auth`` into what opens a source: named secrets, identity tokens, an external id."""

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bdn.core.errors import InvalidRequestError, SecretMalformedError, SecretNotFoundError
from bdn.core.source.uri import Auth, AuthMethod
from bdn.core.store import reader_of
from bdn.mirror.db.secrets import SecretTable
from bdn.mirror.upstream.issuer import DRY_RUN, IdentityIssuer, TokenSubject
from bdn.sources.sign_in import (
    Assertion,
    AwsAssumedRole,
    AwsRole,
    AwsWebIdentity,
    GoogleServiceAccount,
    Secret,
    SignIn,
    SourceContext,
)
from bdn.wire.access_schema import DEFAULT_ORGANISATION, is_secret_name

_INFRASTRUCTURE: Final = "infrastructure"


@dataclass(frozen=True)
class OperatorSecrets:
    """Reads ``<prefix><NAME>`` (as written, then in upper case with ``_`` for other characters).

    Then reads ``<directory>/<name>``. Needs no database; usable from any event loop.
    """

    directory: Path | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    prefix: str = "BDN_SECRET_"

    async def find(self, name: str) -> str | None:
        """The value of a validly named secret, if it exists. Raises ``SecretMalformedError``."""
        for variable in (f"{self.prefix}{name}", f"{self.prefix}{re.sub('[^A-Z0-9]', '_', name.upper())}"):
            if value := self.environ.get(variable):
                return value
        if self.directory is None:
            return None
        try:
            return await asyncio.to_thread((self.directory / name).read_text, encoding="utf-8")
        except UnicodeDecodeError:
            raise SecretMalformedError(name, "is not text") from None
        except OSError:
            return None  # absent or unreadable: the same for the caller


async def infrastructure_secret(directory: Path | None, setting: str, name: str) -> Secret:
    """A secret of the mirror itself, such as the store's keys. No source can name one: a secret's name has no slash.

    Raises ``InvalidRequestError`` if there is none, or ``SecretMalformedError``.
    """
    folder = directory and directory / _INFRASTRUCTURE
    secrets = OperatorSecrets(folder, prefix="BDN_INFRASTRUCTURE_SECRET_")
    value = await secrets.find(name) if is_secret_name(name) else None
    if value is None:
        raise InvalidRequestError(
            f"{setting}={name}: no such secret; set the environment variable {secrets.prefix}{name}, or write the file "
            f"{_INFRASTRUCTURE}/{name} in BDN_SECRETS_DIR"
        )
    return Secret(name, value)


@dataclass(frozen=True)
class Secrets:
    """The operator's secrets, for organisations in ``served``; then the secrets that an organisation set in ``table``."""

    operators: OperatorSecrets
    table: SecretTable
    served: frozenset[str] = frozenset({DEFAULT_ORGANISATION})

    async def resolve(self, name: str, organisation: str) -> Secret:
        """The secret's current value. Raises ``SecretNotFoundError``, ``SecretMalformedError``."""
        if not is_secret_name(name):
            raise SecretNotFoundError(name)
        operators = await self.operators.find(name) if organisation in self.served else None
        value = operators or await self.table.value(organisation, name)
        if value is None:
            raise SecretNotFoundError(name)
        return Secret(name, value)

    async def is_outranked(self, name: str, organisation: str) -> bool:
        """Whether the operator has a secret of this name for the organisation, so that the table's value is not read."""
        if organisation not in self.served:
            return False
        try:
            return bool(await self.operators.find(name))
        except SecretMalformedError:
            return True


@dataclass(frozen=True)
class SignIns:
    """Resolves sign-ins when a source is opened. ``issuer`` is None if the operator set no address for it.

    ``context`` applies to every source, except for reader and sign-in.
    """

    secrets: Secrets
    issuer: IdentityIssuer | None
    context: SourceContext

    def check(self, auth: Auth | None, organisation: str) -> None:
        """Reject what could never be resolved at the request, before a worker tries it."""
        if auth is not None and auth.method is not AuthMethod.CUSTOM_SECRET:
            self._cloud(auth, TokenSubject(organisation, DRY_RUN))

    async def context_of(
        self, auth: Auth | None, organisation: str, job: str | None, team: str | None = None
    ) -> SourceContext:
        """How to open a source now, for this job. Raises what ``resolve`` does."""
        sign_in = await self.resolve(auth, organisation, job)
        return replace(self.context, reader=reader_of(organisation, team), sign_in=sign_in)

    async def resolve(self, auth: Auth | None, organisation: str, job: str | None) -> SignIn | None:
        """How to sign in now, for this job; None if the request names no method.

        Raises ``SecretNotFoundError``, ``SecretMalformedError``, or ``InvalidRequestError`` if the method is not a
        cloud's.
        """
        if auth is None:
            return None
        if auth.method is AuthMethod.CUSTOM_SECRET:
            return await self.secrets.resolve(auth.fields["auth_secret_name"], organisation)
        return self._cloud(auth, TokenSubject(organisation, job or DRY_RUN))

    def _cloud(self, auth: Auth, subject: TokenSubject) -> SignIn:
        fields = auth.fields
        match auth.method:
            case AuthMethod.AWS_OIDC:
                role = AwsRole(fields["aws_oidc_role_arn"], fields["aws_oidc_region"], subject.session_name)
                return AwsWebIdentity(role, self._assertion(auth.method, subject))
            case AuthMethod.AWS_ASSUME_ROLE:
                role = AwsRole(fields["aws_assume_role_arn"], fields["aws_assume_role_region"], subject.session_name)
                return AwsAssumedRole(role, subject.external_id)
            case AuthMethod.GCP_OIDC:
                account, provider = fields["gcp_oidc_service_account"], fields["gcp_oidc_workload_id_provider"]
                return GoogleServiceAccount.of(account, provider, self._assertion(auth.method, subject))
            case _:
                raise InvalidRequestError(f"auth_method {auth.method} is not a sign-in at a cloud")

    def _assertion(self, method: AuthMethod, subject: TokenSubject) -> Assertion:
        issuer = self.issuer
        if issuer is None:
            raise InvalidRequestError(
                f"{method} needs this mirror to be an OpenID issuer, which it is not: the operator has to set BDN_ISSUER_URL to "
                "the https address under which clouds reach it"
            )
        return Assertion(lambda audience: issuer.token(subject, audience), issuer.url, subject.pattern)
