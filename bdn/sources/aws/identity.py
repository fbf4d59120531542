"""Keys of S3 for an hour: a role of a user's AWS account, taken at STS and taken again before the hour is over.

Only what is passed in counts: the machine's AWS profiles, files and roles are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Final, TypedDict

from aiobotocore.config import AioConfig
from botocore import UNSIGNED

from bdn.core.errors import InvalidRequestError
from bdn.core.pace.asking import ASK_ONCE
from bdn.core.ports import Asker
from bdn.sources.aws.guarded import guarded_options
from bdn.sources.aws.identity_errors import SDK_ERRORS, keep_status, translate
from bdn.sources.aws.session import UnredirectedSession, aws_session
from bdn.sources.credentials import S3Credentials
from bdn.sources.guarded_connector import GuardedResolver
from bdn.sources.refreshing import Refreshing
from bdn.sources.settings import UpstreamSettings
from bdn.sources.sign_in import AWS_AUDIENCE, AwsAssumedRole, AwsWebIdentity

SESSION_SECONDS: Final = 3600  # what every role allows, and all that a role taken with another role's keys may have


class _Keys(TypedDict):
    AccessKeyId: str
    SecretAccessKey: str
    SessionToken: str
    Expiration: datetime


class AwsRoleCredentials:
    """A provider of S3 credentials (see there). The first request is made by the first ``get``.

    Args:
        sign_in: the role, and with what it is taken.
        source: what is read with it, for messages.
        settings: where STS is, and this mirror's own keys, which AWS_ASSUME_ROLE signs with.
        clock: seconds since the epoch.
        asker: sends the requests.
    """

    def __init__(
        self,
        sign_in: AwsWebIdentity | AwsAssumedRole,
        source: str,
        settings: UpstreamSettings,
        *,
        clock: Callable[[], float] = time.time,
        asker: Asker = ASK_ONCE,
    ) -> None:
        if isinstance(sign_in, AwsAssumedRole) and settings.s3_credentials is None:
            raise InvalidRequestError(
                "AWS_ASSUME_ROLE needs AWS keys of this mirror's own, and it has none: the operator sets AWS_ACCESS_KEY_ID "
                "and AWS_SECRET_ACCESS_KEY"
            )
        self._sign_in = sign_in
        self._source = source
        self._settings = settings
        self._refreshing = Refreshing(self._ask, clock, sign_in.role.arn)
        self._asker = asker

    async def get(self) -> S3Credentials:
        """The keys to use now.

        Raises:
            AuthRequiredError: the role cannot be taken; says what to change, and where.
            UpstreamRateLimitedError, UpstreamUnavailableError: may work later.
        """
        return await self._refreshing.get()

    async def _ask(self) -> S3Credentials:
        # The address is for the budget of requests; the client knows the names of other partitions.
        url = self._settings.sts_endpoint_url or f"https://sts.{self._sign_in.role.region}.amazonaws.com"
        return await self._asker.ask(url, self._take_role)

    async def _take_role(self) -> S3Credentials:
        sign_in, role = self._sign_in, self._sign_in.role
        request = {"RoleArn": role.arn, "RoleSessionName": role.session_name, "DurationSeconds": SESSION_SECONDS}
        try:
            async with self._client() as sts:
                sts.meta.events.register("before-parse.sts", keep_status)
                if isinstance(sign_in, AwsAssumedRole):
                    answer = await sts.assume_role(**request, ExternalId=sign_in.external_id)
                else:
                    token = sign_in.assertion.sign(AWS_AUDIENCE)
                    answer = await sts.assume_role_with_web_identity(**request, WebIdentityToken=token)
            keys: _Keys = answer["Credentials"]
            return S3Credentials(
                keys["AccessKeyId"],
                keys["SecretAccessKey"],
                keys["SessionToken"],
                role.region,
                keys["Expiration"].timestamp(),
            )
        except SDK_ERRORS as error:
            # Not the cause: the client's own errors repeat what was sent and received.
            raise translate(error, sign_in, self._source) from None

    def _client(self) -> AbstractAsyncContextManager[Any]:
        """A client of STS, with keys of our own only where these take the role."""
        own = self._settings.s3_credentials if isinstance(self._sign_in, AwsAssumedRole) else None
        guard = guarded_options(GuardedResolver(self._settings.egress))
        guard["http_session_cls"] = UnredirectedSession
        config = AioConfig(
            signature_version="v4" if own else UNSIGNED,
            ignore_configured_endpoint_urls=True,
            connect_timeout=10,
            read_timeout=30,
            retries={"total_max_attempts": 1, "mode": "standard"},
            **guard,
        )
        client: AbstractAsyncContextManager[Any] = aws_session().create_client(
            "sts",
            region_name=self._sign_in.role.region,
            endpoint_url=self._settings.sts_endpoint_url,
            verify=self._settings.ca_bundle,
            aws_access_key_id=own and own.access_key_id,
            aws_secret_access_key=own and own.secret_access_key,
            aws_session_token=own and own.session_token,
            config=config,
        )
        return client
