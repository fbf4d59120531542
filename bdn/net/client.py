"""A client of one service and its small JSON documents, over TCP or a unix socket."""

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from math import inf
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx2
from pydantic import BaseModel, ValidationError

from bdn.core.chunk import CHUNK_SIZE, Digest, MalformedDocumentError, digest_of
from bdn.core.errors import BdnError, InternalError, InvalidRequestError, StoreUnavailableError, UnauthenticatedError
from bdn.core.manifest import Root
from bdn.core.pace.retry import Outage, RetryPolicy
from bdn.net.ambient import check_proxies
from bdn.net.tls import Authorities, advice_on, failure_of_tls
from bdn.traces import spans
from bdn.wire.http_fields import (
    AGENT_HEADER,
    DATA_PORT_HEADER,
    DELIVERY_HEADER,
    LONGEST_WAIT_SECONDS,
    ORGANISATION_HEADER,
    authorization,
    chunk_path,
)
from bdn.wire.location_schema import Delivery
from bdn.wire.shapes import ServiceUnreachableError, UntrustedServiceError, WrongDocumentError, error_from

_NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no server; cheap to create
_CONNECT_SECONDS = 5.0  # a host that is down does not answer at all
# h11 would parse the rest of one response, such as a duplicate, as the response to the connection's next request.
_ONE_REQUEST_EACH = httpx2.Limits(max_keepalive_connections=0)
OUTAGE_SECONDS: Final = 600.0  # enough for a mirror to restart, or to move to another machine
_OUTAGE_POLICY: Final = RetryPolicy(OUTAGE_SECONDS, attempts=1, first_seconds=0.5)
_NOT_MODIFIED: Final = 304
_LONGEST_TOKEN: Final = 64 * 1024  # bytes of a token's file
_Body = TypeVar("_Body", bound=BaseModel)
_Answer = TypeVar("_Answer")
Params = Mapping[str, str | list[str]]


class _Info(BaseModel):
    version: str


class _Description(BaseModel):
    """The part of a service's OpenAPI document that clients use."""

    info: _Info


@dataclass(frozen=True, slots=True)
class _Reply:
    """``headers`` is a mapping that ignores the case of names."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


def unreachable_service(address: str, error: Exception) -> ServiceUnreachableError:
    """The error of a connection to one of our services that failed with ``error``."""
    failure = failure_of_tls(error)
    said = "; ".join(filter(None, (str(error) or type(error).__name__, advice_on(failure))))
    is_untrusted = isinstance(failure, ssl.SSLCertVerificationError)
    return (UntrustedServiceError if is_untrusted else ServiceUnreachableError)(address, said)


def read_token(file: Path) -> str:
    """The token in a file that another program replaces before the token expires, such as the kubelet. Blocking.

    Raises ``UnauthenticatedError``: the file cannot be read, or contains no token.
    """
    try:
        with file.open("rb") as opened:
            token = opened.read(_LONGEST_TOKEN).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise UnauthenticatedError(f"the token in {file} cannot be read: {error}") from None
    if not token.isprintable() or " " in token or not token:
        raise UnauthenticatedError(f"{file} contains no token: expected one line of printable ASCII without spaces")
    return token


class ServiceClient:
    """A client of one service. ``address`` is a URL, or ``unix:/path/to/socket``. Close it, or use it as a context.

    A request takes at most ``timeout_seconds`` plus the wait that it requests, even while bytes arrive, and at most
    ``silence_seconds`` without any byte. ``organisation`` is the organisation that an operator acts for; None: the
    operator's own. ``agent_token`` identifies an agent, where ``bearer`` is a job's grant; a path is a file with it.
    ``token_file`` holds the token instead of ``bearer``. Files are read at each request. ``authorities`` are for https;
    None: the system's.

    Raises ``InvalidRequestError``: a proxy or authorities named by the environment cannot be used.
    """

    def __init__(
        self,
        address: str,
        bearer: str | None = None,
        *,
        organisation: str | None = None,
        token_file: Path | None = None,
        agent_token: str | Path | None = None,
        timeout_seconds: float = 30.0,
        silence_seconds: float = inf,
        authorities: Authorities | None = None,
    ) -> None:
        self.address = address
        self.bearer = bearer  # may be replaced: later requests send the new one
        self._token_file = token_file
        self._agent_token = agent_token
        self._silence_seconds = silence_seconds
        socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        self.base_url = "http://agent" if socket else address.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._authorities = authorities or Authorities() if self.base_url.startswith("https:") else None
        self._given: dict[str, Any] = {
            "base_url": self.base_url,
            "transport": httpx2.AsyncHTTPTransport(verify=_NO_TLS, uds=socket, limits=_ONE_REQUEST_EACH)
            if socket
            else None,
            "limits": _ONE_REQUEST_EACH,
            "headers": {ORGANISATION_HEADER: organisation} if organisation else {},
            "timeout": timeout_seconds,
            "trust_env": not socket and _host_of(address) not in ("127.0.0.1", "::1", "localhost"),
        }
        if self._given["trust_env"]:
            check_proxies()
        self._trusted: ssl.SSLContext | None = None
        self._clients = [self._new_client()]

    def _new_client(self) -> httpx2.AsyncClient:
        if self._authorities is not None:
            self._trusted = self._authorities.context()
        return httpx2.AsyncClient(verify=self._trusted or _NO_TLS, **self._given)

    @property
    def _http(self) -> httpx2.AsyncClient:
        """A client with the current authorities. Requests on an older client continue; ``close`` closes all clients."""
        if self._authorities is not None and self._authorities.context() is not self._trusted:
            self._clients.append(self._new_client())
        return self._clients[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def within(self, seconds: float, answer: Awaitable[_Answer]) -> _Answer:
        """Await ``answer``. Raises ``ServiceUnreachableError`` after ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError as error:
            raise ServiceUnreachableError(self.address, f"no complete answer within {seconds:g} s") from error

    async def ready(self) -> bool:
        try:
            await self.check_ready()
        except BdnError:
            return False
        return True

    async def check_ready(self) -> None:
        """Raises the error that the service reports, or the error of its connection."""
        await self._request("GET", "/readyz")

    async def served_at(self) -> float | None:
        """The service's clock in seconds since 1970, to a second; None without ``Date`` (RFC 9110, section 6.6.1)."""
        shown = (await self._request("GET", "/healthz")).headers.get("date")
        try:
            return None if shown is None else parsedate_to_datetime(shown).timestamp()
        except ValueError:
            return None

    async def version(self) -> str:
        return (await self._call(_Description, "GET", "/openapi.json")).info.version

    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        wait_seconds: float = 0,
        most_bytes: int | None = None,
    ) -> _Reply:
        """Send a request. The response's status may be 304.

        Raises ``WrongDocumentError`` for a response of more than ``most_bytes``, without reading it to its end.
        """
        trace = spans.traceparent()
        headers = {**await self._credentials(), **({"traceparent": trace} if trace else {}), **(headers or {})}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = body.model_dump_json() if body is not None else None
        longest = self._timeout_seconds + wait_seconds
        silence, connect = min(self._silence_seconds, longest), min(_CONNECT_SECONDS, self._timeout_seconds)
        try:
            async with asyncio.timeout(longest):
                async with self._http.stream(
                    method,
                    path,
                    content=content,
                    params=params,
                    headers=headers,
                    timeout=httpx2.Timeout(silence, connect=connect),
                    extensions={"trace": _HandshakeTrace()},
                ) as response:
                    answer = await self._read(response.aiter_bytes(), path, most_bytes)
        except httpx2.RequestError as error:
            raise unreachable_service(self.address, error) from error
        except TimeoutError as error:
            raise ServiceUnreachableError(self.address, f"no complete answer within {longest:g} s") from error
        if not response.is_success and response.status_code != _NOT_MODIFIED:
            reported = error_from(response.status_code, bytes(answer))
            if isinstance(reported, StoreUnavailableError):
                # From a gateway, which does not name the service behind it.
                raise ServiceUnreachableError(self.address, reported.reason)
            raise reported
        return _Reply(response.status_code, response.headers, answer)

    async def _credentials(self) -> dict[str, str]:
        bearer = self.bearer if self._token_file is None else await asyncio.to_thread(read_token, self._token_file)
        shown = self._agent_token
        agent = await asyncio.to_thread(read_token, shown) if isinstance(shown, Path) else shown
        return {**authorization(bearer), **({AGENT_HEADER: agent} if agent else {})}

    async def _read(self, pieces: AsyncIterator[bytes], path: str, most_bytes: int | None) -> bytearray:
        answer = bytearray()
        async for piece in pieces:
            answer += piece
            if most_bytes is not None and len(answer) > most_bytes:
                raise WrongDocumentError(f"the answer for {path}", self.address, f"it has more than {most_bytes} bytes")
        return answer

    async def _call(
        self,
        kind: type[_Body],
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        wait_seconds: float = 0,
    ) -> _Body:
        reply = await self._request(method, path, body=body, params=params, headers=headers, wait_seconds=wait_seconds)
        try:
            return kind.model_validate_json(reply.body)
        except ValidationError as error:
            raise InternalError(f"the answer of {self.address}{path} is not a {kind.__name__}") from error

    async def _poll(
        self,
        kind: type[_Body],
        method: str,
        path: str,
        seconds: float,
        body: BaseModel | None = None,
        *,
        params: Params | None = None,
    ) -> _Body:
        """``_call`` of a route that may wait up to ``seconds`` before it answers."""
        given = {**(params or {}), "wait": str(max(0.0, min(LONGEST_WAIT_SECONDS, seconds)))}
        return await self._call(kind, method, path, body=body, params=given, wait_seconds=seconds)


@dataclass(frozen=True, slots=True)
class DataPlane:
    """Where a mirror serves chunks: at ``port`` of its host, None: at its API. ``direct``: in its store's bucket."""

    port: int | None = None
    delivery: Delivery = "proxy"


def at_port(api_url: str, data_port: int | None) -> str:
    """URL of a service's data plane: the same host with another port, or the API's own URL."""
    if data_port is None:
        return api_url
    parts = urlsplit(api_url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return urlunsplit((parts.scheme, f"{host}:{data_port}", "", "", ""))


class ContentClient(ServiceClient):
    """Reads roots of manifests from the mirror's API or an agent's data plane, and verifies them."""

    async def root(
        self, digest: Digest, bearer: str | None, *, is_known: bool = False
    ) -> tuple[Root | None, DataPlane]:
        """Read a root from the mirror, and how its chunks are delivered. The root is None if ``is_known``."""
        headers = {"If-None-Match": f'"{digest}"'} if is_known else {}
        reply = await self._document(f"/manifests/{digest}", bearer, headers)
        port = reply.headers.get(DATA_PORT_HEADER)
        if port is not None and not (port.isascii() and port.isdecimal()):
            raise WrongDocumentError(f"manifest {digest}", self.address, f"its {DATA_PORT_HEADER} is {port[:20]!a}")
        delivery: Delivery = "direct" if reply.headers.get(DELIVERY_HEADER) == "direct" else "proxy"
        root = None if reply.status == _NOT_MODIFIED else self._parsed(digest, reply.body)
        return root, DataPlane(None if port is None else int(port), delivery)

    async def held_root(self, digest: Digest, bearer: str | None) -> Root:
        """Read a root from an agent that holds it."""
        return self._parsed(digest, (await self._document(chunk_path(digest), bearer, {})).body)

    async def _document(self, path: str, bearer: str | None, headers: Mapping[str, str]) -> _Reply:
        return await self._request("GET", path, headers={**headers, **authorization(bearer)}, most_bytes=CHUNK_SIZE)

    def _parsed(self, digest: Digest, content: bytearray) -> Root:
        if (actual := digest_of(content)) != digest:
            raise WrongDocumentError(f"manifest {digest}", self.address, f"its content has the digest {actual}")
        try:
            root = Root.parse(content)
        except MalformedDocumentError as error:
            raise InternalError(f"manifest {digest}: {error}") from error
        if root.content != content:
            raise InternalError(f"manifest {digest}: its root is not in canonical form")
        return root


class _HandshakeTrace:
    """Closes the connection of a request that is canceled in its TLS handshake, which httpcore leaves open."""

    def __init__(self) -> None:
        self._connection: Any = None

    async def __call__(self, event: str, facts: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connection = facts["return_value"]
        elif event == "connection.start_tls.failed":
            await self._connection.aclose()


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError as error:
        raise InvalidRequestError(
            f"{address} is not the address of a service ({error}); write one such as http://mirror:8460"
        ) from None


@dataclass(frozen=True)
class OutageRetry:
    """Repeats a request while the service is unavailable, as the policy says.

    ``told`` is called with the first of consecutive failures, and with None after the next success.
    """

    told: Callable[[BdnError | None], None] = lambda _: None
    policy: RetryPolicy = _OUTAGE_POLICY

    async def ask(
        self, question: Callable[[], Awaitable[_Answer]], but: Callable[[BdnError], bool] = lambda _: False
    ) -> _Answer:
        """Run ``question``, which must have no side effects, until it succeeds.

        Raises transient errors when the policy's time is over, and errors selected by ``but`` at once.
        """
        outage = Outage(self.policy)
        while True:
            sent = time.monotonic()
            try:
                answer = await question()
            except BdnError as error:
                if but(error):
                    self._end(outage)
                    raise
                delay = outage.delay(error, time.monotonic() - sent, random.random())  # noqa: S311 - not a secret
                if delay is None:
                    raise
                if outage.failures == 1:
                    self.told(error)
                await asyncio.sleep(delay)
                continue
            self._end(outage)
            return answer

    def _end(self, outage: Outage) -> None:
        if outage.failures:
            self.told(None)

    async def follow(
        self, question: Callable[[], Awaitable[_Answer]], is_last: Callable[[_Answer], bool]
    ) -> AsyncIterator[_Answer]:
        while True:
            answer = await self.ask(question)
            yield answer
            if is_last(answer):
                return
