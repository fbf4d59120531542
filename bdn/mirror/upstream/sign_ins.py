"""From a request's ``auth`` to what a source is opened with: secrets by name, identity tokens, the organisation's external id."""

from dataclasses import dataclass

from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import Auth, AuthMethod
from bdn.mirror.upstream.issuer import DRY_RUN, IdentityIssuer, TokenSubject
from bdn.mirror.upstream.secrets import Secrets
from bdn.sources.sign_in import Assertion, AwsAssumedRole, AwsRole, AwsWebIdentity, GoogleServiceAccount, SignIn


@dataclass(frozen=True)
class SignIns:
    """Resolves sign-ins when a source is opened. ``issuer`` is None where the operator named no address for it."""

    secrets: Secrets
    issuer: IdentityIssuer | None

    def check(self, auth: Auth | None, organisation: str) -> None:
        """Refuse what could never be resolved, when it is asked for and not when somebody works on it."""
        if auth is not None and auth.method is not AuthMethod.CUSTOM_SECRET:
            self._cloud(auth, TokenSubject(organisation, DRY_RUN))

    async def resolve(self, auth: Auth | None, organisation: str, job: str) -> SignIn | None:
        """How to sign in now, for this job; None where the request names no way.

        Raises:
            SecretNotFoundError, SecretMalformedError: the secret is not there, or not text.
            InvalidRequestError: a field does not name what it should, or this mirror has no address as an issuer.
        """
        if auth is None:
            return None
        if auth.method is AuthMethod.CUSTOM_SECRET:
            return await self.secrets.resolve(auth.fields["auth_secret_name"], organisation)
        return self._cloud(auth, TokenSubject(organisation, job))

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
                raise InvalidRequestError(f"auth_method {auth.method} is not one of a cloud's")

    def _assertion(self, method: AuthMethod, subject: TokenSubject) -> Assertion:
        issuer = self.issuer
        if issuer is None:
            raise InvalidRequestError(
                f"{method} needs this mirror to be an OpenID issuer, and it is none: the operator sets BDN_ISSUER_URL to "
                "the https address under which clouds reach it"
            )
        return Assertion(lambda audience: issuer.token(subject, audience), issuer.url, subject.pattern)
