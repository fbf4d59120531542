"""The HTTP session of ``huggingface_hub``, limited to one attempt with timeouts, and the meaning of its failures.

Unmodified, the SDK retries a failed page of a listing up to five times with its own sleeps, has no timeout, and on a
failed connection closes the shared session under other threads. Here only the caller retries (``core/pace/retry.py``),
because only the caller knows how long an upstream asked to wait. The SDK has one session per process, replaced only
through ``set_client_factory``; calls outside :func:`one_attempt` behave as before.

Inside it every request passes the egress guard, redirects included: a hook of httpx2 checks the host as written for
each request, through a proxy too, and the connection checks the addresses that the host resolves to. The same hook
removes the token from requests to any origin other than the configured endpoint: the SDK sends it to every host that it
assumes to be a hub.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from ssl import SSLContext
from threading import Lock
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore2
import httpx2
from huggingface_hub import get_session, hf_raise_for_status, set_client_factory
from huggingface_hub.errors import (
    BucketNotFoundError,
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.errors import RevisionNotFoundError as HubRevisionNotFoundError

from bdn.core.egress import PUBLIC_INTERNET, EgressPolicy
from bdn.core.errors import (
    AuthRequiredError,
    BdnError,
    GatedSourceError,
    InvalidSourceError,
    RevisionNotFoundError,
    SourceChangedError,
    SourceNotFoundError,
    UpstreamRateLimitedError,
    UpstreamUnavailableError,
)
from bdn.core.source.uri import BucketUri, HuggingFaceUri
from bdn.net.http1.pool import resolve
from bdn.net.unreachable import unreachable
from bdn.wire.http_fields import parse_retry_after

PATIENCE: Final = {"connect": 10.0, "read": 60.0, "write": 60.0, "pool": 60.0}  # seconds, where the SDK sets none
_REPEATED_BY_THE_SDK: Final = (408, 429, 500, 502, 503, 504)
_AGENT_REGISTRY: Final = "/api/agent-harnesses"

_egress: Final[ContextVar[EgressPolicy | None]] = ContextVar("_egress", default=None)  # None: the call is not ours
_endpoint: Final[ContextVar[str]] = ContextVar("_endpoint", default="")
_installing: Final = Lock()


class HubUnreachableError(Exception):
    """The connection failed, before or during an answer. Not an httpx2 error, because the SDK retries those."""


@contextmanager
def one_attempt(egress: EgressPolicy, endpoint: str = "") -> Iterator[None]:
    """Inside, a call of the SDK sends each request once and fails at once, with a status or HubUnreachableError.

    Requests that the policy refuses fail with EgressRefusedError, which the SDK passes on. A token is sent to the
    origin of ``endpoint`` alone.
    """
    with _installing:
        _install()
    token, place = _egress.set(egress), _endpoint.set(endpoint)
    try:
        yield
    finally:
        _endpoint.reset(place)
        _egress.reset(token)


@cache
def warm_up() -> None:
    """Open the session in advance: loading certificates takes 0.1 s, which delays the first request otherwise."""
    with one_attempt(PUBLIC_INTERNET):
        get_session()


@cache
def _install() -> None:
    hooks = get_session().event_hooks  # the SDK's own: offline mode, request ids
    hooks = {**hooks, "request": [*hooks.get("request", ()), _judge]}
    # Built as the SDK builds it, without ``transport=``, which would disable HTTPS_PROXY.
    set_client_factory(lambda: _Session(event_hooks=hooks, follow_redirects=True, timeout=None))


def _judge(request: httpx2.Request) -> None:
    if egress := _egress.get():
        egress.admit(request.url.raw_host.decode("ascii"))
        if origin_of(str(request.url)) != origin_of(_endpoint.get()):
            request.headers.pop("Authorization", None)


def origin_of(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: the scope of a token. Raises ``ValueError`` if not an address."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class _Session(httpx2.Client):
    # The options are passed on unchanged; their types have private names in httpx2.
    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        if not isinstance(self._transport, DirectTransport):
            raise TypeError(
                "this version of httpx2 makes its connections in another way; the egress guard does not know it"
            )

    def _init_transport(self, *_: Any, **options: Any) -> httpx2.BaseTransport:  # noqa: ANN401
        return DirectTransport(_egress.get, options["limits"])

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:  # noqa: ANN401
        if _egress.get() is None:
            return super().send(request, **options)
        if request.url.path == _AGENT_REGISTRY:
            # Telemetry, sent to the SDK's default endpoint, which may differ from the configured one.
            return httpx2.Response(404, request=request)
        named = {name: limit for name, limit in request.extensions.get("timeout", {}).items() if limit is not None}
        request.extensions = {**request.extensions, "timeout": {**PATIENCE, **named}}
        try:
            response = super().send(request, **options)
        except httpx2.TransportError as error:
            raise HubUnreachableError(f"{request.url.host}: {type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in _REPEATED_BY_THE_SDK:
            hf_raise_for_status(response)
        return response


class GuardedBackend(httpcore2.NetworkBackend):
    """Connects to checked addresses, never to a name."""

    def __init__(self, policy: EgressPolicy) -> None:
        self._policy = policy
        self._sockets = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address that answers; certificates are still checked against the name.

        Raises:
            EgressRefusedError: nothing was sent.
            httpcore2.ConnectError, httpcore2.ConnectTimeout: as in the default backend.
        """
        try:
            found = resolve(host, port, timeout, self._policy)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        failure: Exception = httpcore2.ConnectError("the name has no address")
        for _, _, _, _, address in found:
            try:
                return self._sockets.connect_tcp(str(address[0]), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class GuardedTransport(httpx2.HTTPTransport):
    def __init__(self, policy: EgressPolicy, tls: SSLContext, limits: httpx2.Limits) -> None:
        super().__init__(verify=tls, limits=limits)
        # Closing the default pool also proves that it still has this name: another version must fail here, not run
        # unguarded.
        self._pool.close()
        self._pool = httpcore2.ConnectionPool(
            ssl_context=tls,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=GuardedBackend(policy),
        )


class DirectTransport(httpx2.BaseTransport):
    """Connections without a proxy, guarded by the policy of the current call; without a policy, as httpx2 makes them.

    Each policy has its own pool, so that no connection is reused under a policy that would have refused it.
    """

    def __init__(self, policy_of_call: Callable[[], EgressPolicy | None], limits: httpx2.Limits) -> None:
        self._policy_of_call = policy_of_call
        self._limits = limits
        self._tls = httpx2.create_ssl_context()
        self._transports: dict[EgressPolicy | None, httpx2.HTTPTransport] = {}
        self._lock = Lock()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        policy = self._policy_of_call()
        with self._lock:
            if policy not in self._transports:
                self._transports[policy] = (
                    httpx2.HTTPTransport(verify=self._tls, limits=self._limits)
                    if policy is None
                    else GuardedTransport(policy, self._tls, self._limits)
                )
            transport = self._transports[policy]
        return transport.handle_request(request)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


# The last five are what the SDK raises on an answer that is not a hub's, such as a proxy's HTML page with status 200.
SDK_ERRORS: Final = (
    HubUnreachableError,
    OfflineModeIsEnabled,
    httpx2.HTTPError,
    httpx2.InvalidURL,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


_SIGN_IN: Final = (
    "set HF_TOKEN or run 'hf auth login' (without BDN_AUTH=token), or name a secret that holds the token: "
    "auth_secret_name NAME, and BDN_SECRET_NAME in the environment"
)
_HIDDEN: Final = f"Check the spelling of its name first. If it is private, {_SIGN_IN}"
_GATED: Final = f"Accept its terms on the hub with your account, and then {_SIGN_IN}"


def translate(error: Exception, uri: HuggingFaceUri | BucketUri, path: str, *, anonymous: bool) -> BdnError:
    """Map one of ``SDK_ERRORS``, raised by a request for ``path`` (empty: for the whole source), to our error."""
    source = str(uri)
    match error:
        # Subclasses first: in the SDK, a gated repository is also a repository not found.
        case GatedRepoError():
            return AuthRequiredError(source, "it is gated", _GATED) if anonymous else GatedSourceError(source)
        case DisabledRepoError():
            return SourceNotFoundError(source, "the hub has disabled it")
        case HubRevisionNotFoundError() if isinstance(uri, HuggingFaceUri):
            return RevisionNotFoundError(source, uri.revision or "the default branch")
        case RemoteEntryNotFoundError():
            return SourceChangedError(source, path, "the hub no longer has it")
        case HfHubHTTPError():
            return _refused(error, source, anonymous=anonymous)
        case _:
            return _failed(error, source)


def _failed(error: Exception, source: str) -> BdnError:
    match error:
        case HFValidationError():
            return InvalidSourceError(source, f"{source}: this is not a valid name of a repository")
        case HubUnreachableError() | OfflineModeIsEnabled() | httpx2.HTTPError() | httpx2.InvalidURL():
            return unreachable(source, f"the hub did not answer ({error})", error)
        case _:
            return UpstreamUnavailableError(source, f"the answer does not look like a hub's ({type(error).__name__})")


def _refused(error: HfHubHTTPError, source: str, *, anonymous: bool) -> BdnError:
    status = error.response.status_code
    # The first line of the hub's message. The SDK's own message is left out: it contains addresses and advice for its
    # users.
    said = (error.server_message or error.response.reason_phrase).partition("\n")[0][:200]
    answer = f"the hub answered {status}: {said}"
    if status == 401:
        # The hub does not reveal to strangers whether a private repository exists.
        hidden = "the hub answered 401: it does not exist, or it is private"
        said, remedy = (hidden, _HIDDEN) if anonymous else (f"the token is not valid: {answer}", "")
        return AuthRequiredError(source, said, remedy)
    if isinstance(error, RepositoryNotFoundError | BucketNotFoundError):
        hidden = "is private and needs a secret" if anonymous else "is hidden from the account of this token"
        return SourceNotFoundError(source, f"it does not exist, or it {hidden}")
    if status == 403:
        return AuthRequiredError(source, answer)
    if status == 429:
        return UpstreamRateLimitedError(source, parse_retry_after(error.response.headers))
    if status == 408 or status >= 500:
        return UpstreamUnavailableError(source, answer, parse_retry_after(error.response.headers))
    return SourceNotFoundError(source, answer)
