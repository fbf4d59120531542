"""The AWS role of the mirror's pod, task or instance. Used for the mirror's store alone: sources belong to users."""

from collections.abc import Callable

from aiobotocore.session import get_session

from bdn.core.errors import InvalidRequestError, StoreUnavailableError
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.credentials import SDK_ERRORS
from bdn.sources.settings import S3Credentials


def role_of_machine(clock: Callable[[], float]) -> Refreshing[S3Credentials]:
    """Keys as the AWS SDK finds them: a web identity token, a profile, the container's or the instance's metadata.

    Its ``get`` raises ``InvalidRequestError`` if there are none, and ``StoreUnavailableError`` if the service that
    issues them does not answer.
    """
    return Refreshing(_find_keys, clock, "the AWS role of this machine")


async def _find_keys() -> S3Credentials:
    try:
        found = await get_session().get_credentials()
        keys = None if found is None else await found.get_frozen_credentials()
    except SDK_ERRORS as error:
        # Not the cause: the client's own errors repeat what was sent and received.
        raise StoreUnavailableError(f"no keys of AWS could be found ({type(error).__name__})") from None
    if keys is None:
        raise InvalidRequestError(
            "BDN_STORE needs credentials: name a secret that holds them with BDN_STORE_SECRET, set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give this machine a role of AWS"
        )
    ends = getattr(found, "_expiry_time", None)  # credentials that refresh themselves have none
    expires_at = None if ends is None else ends.timestamp()
    return S3Credentials(keys.access_key, keys.secret_key, keys.token, expires_at=expires_at)
