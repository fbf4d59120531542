"""Addresses and signatures of requests to a bucket of S3, an S3-compatible server, or Google Cloud Storage.

Google Cloud Storage is used through its XML API, which is S3's with other names for some headers. So the requests are
the same, and all are signed in their addresses.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from bdn.core.errors import InvalidRequestError, SecretMalformedError
from bdn.core.source.uri import BucketUri
from bdn.sources.gcs.tokens import ambient_key
from bdn.sources.refreshing import Refreshing
from bdn.sources.s3.client import S3Endpoint, bucket_address, s3_client
from bdn.sources.s3.credentials import endpoint_of
from bdn.sources.s3.machine_role import role_of_machine
from bdn.sources.s3.signature import AddressSigner
from bdn.sources.settings import S3Credentials
from bdn.sources.sign_in import Secret, SourceContext, s3_credentials, service_account_key

Pairs = Sequence[tuple[str, str]]
Reread = Callable[[], Awaitable[Secret]]
_Result = TypeVar("_Result")
_ADDRESS_SECONDS: Final = 900
# For a PUT or DELETE. The mirror considers one without an answer over after 900 s: within the remaining time the
# server may still retry it, and its clock may be slow.
_CHANGE_SECONDS: Final = 300
_REREAD_SECONDS: Final = 1200.0  # a secret is read again when a quarter of this is left: after a quarter of an hour
_PATIENCE_SECONDS: Final = 60.0  # for credentials; requests for them time out earlier


@dataclass(frozen=True, slots=True)
class Dialect:
    """Header names in lower case; ``vendor`` is the prefix of the server's own headers."""

    vendor: str
    only_if_absent: tuple[str, str]
    crc32c: tuple[str, str]  # a header, and the prefix of its value

    def checked(self, crc32c: str) -> tuple[str, str]:
        """The header by which the server verifies a body."""
        name, before = self.crc32c
        return name, before + crc32c


S3_DIALECT: Final = Dialect("x-amz-", ("if-none-match", "*"), ("x-amz-checksum-crc32c", ""))
GCS_DIALECT: Final = Dialect("x-goog-", ("x-goog-if-generation-match", "0"), ("x-goog-hash", "crc32c="))


class LoopInThread:
    """A separate event loop that renews credentials, so that byte threads never wait for the program's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-credentials", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run from another thread. Raises ``TimeoutError`` after a minute."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_PATIENCE_SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class BucketAccess:
    """Signs addresses.

    ``sign(now, seconds)`` makes a signer for addresses that are valid for ``seconds`` from ``now``. It blocks while
    credentials are renewed, and raises ``BdnError``.
    """

    dialect: Dialect
    sign: Callable[[int, int], AddressSigner]
    close: Callable[[], None]
    clock: Callable[[], float] = time.time
    _signers: dict[int, AddressSigner] = field(default_factory=dict, init=False)

    @property
    def signer(self) -> AddressSigner:
        """Signs addresses that are valid for a quarter of an hour, or until the keys expire. Thread-safe."""
        return self._signer(_ADDRESS_SECONDS)

    def address(self, method: str, key: str, query: Mapping[str, str], headers: Pairs) -> str:
        """The signed address of one request. The signature covers the server's own headers, as the server requires.

        The server refuses a PUT or DELETE that arrives after its signature has expired.
        """
        own = [pair for pair in headers if pair[0].startswith(self.dialect.vendor)]
        signer = self._signer(_CHANGE_SECONDS) if method in ("PUT", "DELETE") else self.signer
        return signer.address(key, query, method=method, headers=own)

    def _signer(self, seconds: int) -> AddressSigner:
        now, signer = int(self.clock()), self._signers.get(seconds)
        if signer is None or signer.signed_at != now:
            signer = self._signers[seconds] = self.sign(now, seconds)
        return signer


def open_access(uri: BucketUri, context: SourceContext, reread: Reread | None = None) -> BucketAccess:
    """Set up credentials and the address of the bucket. Sends no request to it; blocks for some tenths of a second.

    ``reread`` reads the secret of ``context`` again later: S3 keys are often valid only for hours.

    Raises:
        InvalidRequestError: no credentials, or credentials of another cloud.
        SecretMalformedError: the secret does not contain what this cloud needs.
    """
    if uri.scheme == "gs":
        return _google(uri, context)
    endpoint = endpoint_of(uri, context)
    credentials = None if uri.scheme == "r2" and context.sign_in is None else endpoint.credentials
    if credentials is not None and reread is not None:
        credentials = _reread_keys(reread, context)
    if credentials is None and uri.scheme == "r2":
        raise _no_credentials("")
    if credentials is None:
        credentials = role_of_machine(context.clock)
    loop = LoopInThread()
    try:
        loop.run(credentials.get())
        base = loop.run(_base(uri, endpoint, context))
    except BaseException:
        loop.close()
        raise

    def sign(now: int, seconds: int) -> AddressSigner:
        return AddressSigner.of(base, endpoint.region, loop.run(credentials.get()), now, seconds)

    return BucketAccess(S3_DIALECT, sign, loop.close, context.clock)


def _reread_keys(reread: Reread, context: SourceContext) -> Refreshing[S3Credentials]:
    async def read() -> S3Credentials:
        keys, until = s3_credentials(await reread()), context.clock() + _REREAD_SECONDS
        return replace(keys, expires_at=until if keys.expires_at is None else min(until, keys.expires_at))

    return Refreshing(read, context.clock, "BDN_STORE_SECRET")


def _google(uri: BucketUri, context: SourceContext) -> BucketAccess:
    """Requires a service account's key: other credentials cannot sign addresses for agents."""
    secret = context.sign_in if isinstance(context.sign_in, Secret) else ambient_key(context)
    if secret is None:
        raise _no_credentials("GOOGLE_APPLICATION_CREDENTIALS")
    account = service_account_key(secret)
    try:
        key = load_pem_private_key(account.private_key.encode(), None)
    except ValueError:
        key = None
    if not isinstance(key, RSAPrivateKey):
        raise SecretMalformedError(secret.name, 'has a "private_key" that is not a private key in PEM form')
    base = f"{context.settings.gcs_endpoint_url}/{quote(uri.bucket)}/"
    sign = partial(AddressSigner.of_google, base, account.client_email, key)
    return BucketAccess(GCS_DIALECT, sign, lambda: None, context.clock)


def _no_credentials(variables: str) -> InvalidRequestError:
    ambient = f", or set {variables}" if variables else ""
    return InvalidRequestError(
        f"BDN_STORE needs credentials: name a secret that holds them with BDN_STORE_SECRET{ambient}"
    )


async def _base(uri: BucketUri, endpoint: S3Endpoint, context: SourceContext) -> str:
    async with s3_client(uri.bucket, endpoint, endpoint.region, context.settings) as client:
        return await bucket_address(client, uri.bucket)
