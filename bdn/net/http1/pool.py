"""A pool of HTTP connections for byte threads: plain blocking sockets, so that a body is copied once, into our buffer.

A name is resolved once, with a timeout. The egress policy checks every address, and the pool connects to a checked
address. ``HTTPS_PROXY`` and ``NO_PROXY`` are honoured for https; a host that the policy refuses is refused through a
proxy, too.

docs/adr/0010 has the figures: why no asyncio client carries bytes; docs/adr/0007 why ``http.client`` and h11 do not.
"""

import errno
import http.client
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from bdn.core.egress import EgressPolicy
from bdn.net.host_lookups import HOST_LOOKUPS, AddressInfo, Question
from bdn.net.http1.answer import HEAD_LIMIT, Answer, AnswerDeadline, AnswerHead, ask, parse_head
from bdn.net.http1.connection import (
    REDIRECT_BODY_LIMIT,
    REDIRECT_LIMIT,
    REDIRECTS,
    Body,
    Connection,
    NoAnswerError,
    Origin,
    ProtocolError,
    follow,
    format_request,
    split_address,
)
from bdn.net.tls import Authorities


def resolve(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> Sequence[AddressInfo]:
    """A host's addresses in the resolver's order, each admitted by the policy, if any. Blocking.

    Raises ``EgressRefusedError`` for a refused host or address; ``OSError`` when the name does not resolve in time.
    """
    asked = host if policy is None else policy.admit(host)
    found = HOST_LOOKUPS.find(Question(asked, port, kind=socket.SOCK_STREAM), timeout_seconds)
    if policy is not None:
        policy.admit_resolved(host, (str(info[4][0]) for info in found))
    return found


def dial(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> socket.socket:
    """Connect to one of the host's addresses, in the resolver's order; the caller closes the socket.

    ``timeout_seconds`` applies to the name, and to each address. Without a policy, every address is allowed.

    Raises ``EgressRefusedError`` for a refused host or address, before any byte is sent; ``OSError`` when the name does
    not resolve, or no address answers (the last error).
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in resolve(host, port, timeout_seconds, policy):
        try:
            with ExitStack() as stack:
                connection = stack.enter_context(socket.socket(family, kind, protocol))
                connection.settimeout(timeout_seconds)
                connection.connect(address)
                stack.pop_all()
                return connection
        except OSError as error:
            failure = error
    raise failure


def https_proxy(host: str) -> str | None:
    """The https proxy for ``host`` by ``HTTPS_PROXY``, else ``ALL_PROXY``, and ``NO_PROXY``; None: connect directly."""
    named = {} if proxy_bypass(host) else getproxies()
    proxy = named.get("https") or named.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


class ProxyRefusedError(ConnectionError):
    """The operator's proxy refuses a tunnel, or its address is unusable."""


@dataclass
class Dialer:
    """Opens connections.

    ``egress`` is None for our own services, whose addresses the operator configures. ``authorities`` are for https.
    """

    timeout_seconds: float
    egress: EgressPolicy | None = None
    authorities: Authorities = field(default_factory=Authorities)

    def connect(self, origin: Origin) -> Connection:
        """Open a connection.

        Raises ``OSError`` or ``ProtocolError``, and ``EgressRefusedError`` when the policy forbids it.
        """
        scheme, host, port = origin
        if scheme == "http":
            return self._open(dial(host, port, self.timeout_seconds, self.egress))
        proxy = https_proxy(host)
        connected = self._tunnel(proxy, host, port) if proxy else dial(host, port, self.timeout_seconds, self.egress)
        try:
            connected.settimeout(self.timeout_seconds)
            trusted = self.authorities.context(is_for_threads=True)
            return self._open(trusted.wrap_socket(connected, server_hostname=host))
        except BaseException:
            connected.close()
            raise

    def _open(self, connected: socket.socket) -> Connection:
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(connected, self.timeout_seconds)

    def _tunnel(self, proxy: str, host: str, port: int) -> socket.socket:
        if self.egress is not None:
            self.egress.admit(host)
        via = urlsplit(proxy)
        if via.scheme != "http":
            raise ProxyRefusedError("HTTPS_PROXY must be an http:// address")
        connected = dial(via.hostname or "", via.port or 80, self.timeout_seconds, None)
        try:
            _open_tunnel(Connection(connected, self.timeout_seconds), f"[{host}]" if ":" in host else host, port, via)
        except BaseException:
            connected.close()
            raise
        return connected


def _open_tunnel(connection: Connection, host: str, port: int, proxy: SplitResult) -> None:
    """Send CONNECT: after a 2xx, every byte is the host's (RFC 9110, section 9.3.6)."""
    place = f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *proxy_credentials(proxy), "", ""]
    connection.send("\r\n".join(lines).encode("latin-1"))
    check_tunnel(parse_head(connection.receive_until(b"\r\n\r\n", HEAD_LIMIT)))
    if connection.has_spare:
        raise ProtocolError("the proxy sent bytes into the tunnel before the host")


def check_tunnel(answer: AnswerHead) -> None:
    """Raise ``ProxyRefusedError`` unless the proxy answered CONNECT with a 2xx."""
    if not 200 <= answer.status < 300:
        meaning = http.client.responses.get(answer.status, "")
        raise ProxyRefusedError(errno.ECONNREFUSED, f"the proxy refused the tunnel: {answer.status} {meaning}".strip())


def proxy_credentials(proxy: SplitResult) -> list[str]:
    """The header line of the credentials in a proxy's address, if any."""
    if proxy.username is None:
        return []
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return [f"Proxy-Authorization: Basic {b64encode(pair.encode()).decode()}"]


# ValueError: an address or a header that cannot be sent.
NETWORK_ERRORS: Final = (OSError, ProtocolError, ValueError)


class ConnectionPool:
    """Idle connections by origin.

    One thread at a time uses a connection, which is reused only after a clean response.

    ``idle_limit`` bounds idle connections over all origins; the least recently used one is closed first.
    ``egress`` restricts destinations; None: for our own services. ``authorities`` default to the system's. A connection
    in use stays open when the authorities change.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        idle_limit: int = 256,
        egress: EgressPolicy | None = None,
        authorities: Authorities | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._idle_limit = idle_limit
        self._dialer = Dialer(timeout_seconds, egress, authorities or Authorities())
        self._idle: list[tuple[Origin, Connection]] = []  # least recently used first
        self._busy: set[Connection] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def get(
        self, url: str, headers: Mapping[str, str], expected: int = 0, deadline: AnswerDeadline | None = None
    ) -> AbstractContextManager[Answer]:
        return self.request("GET", url, headers, expected=expected, deadline=deadline)

    @contextmanager
    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        *,
        expected: int = 0,
        deadline: AnswerDeadline | None = None,
    ) -> Iterator[Answer]:
        """Send a request and yield the response; the caller reads the body, of about ``expected`` bytes if known.

        ``deadline`` limits the wait for a response, instead of the pool's timeout.

        The connection is reused when the body was read to its end, and closed otherwise. An idle connection that the
        server closed meanwhile is replaced once, silently, if no byte of the response arrived (RFC 9110, section
        9.2.2). A DELETE is not repeated: the server may have executed it, and another client may have put the object
        anew.

        Raises ``NETWORK_ERRORS``; ``EgressRefusedError`` for a forbidden address; ``EOFError`` when the file of a
        ``FileBody`` ends before its range does.
        """
        origin, target = split_address(url)
        if body is not None:
            headers = {**headers, "Content-Length": str(len(body))}
        request = format_request(method, origin, target, headers)
        send = partial(ask, body=body or b"", is_head=method == "HEAD")
        connection, is_reused = self._acquire(origin)
        keep = False
        try:
            try:
                answer = send(connection, request, self._timeout_seconds, expected, deadline)
            except NoAnswerError:
                if not is_reused or self._is_closed or method == "DELETE":
                    raise
                self._release(origin, connection, keep=False)
                connection = self._connect(origin)
                answer = send(connection, request, self._timeout_seconds, expected, deadline)
            yield answer
            keep = answer.keeps_alive
        finally:
            self._release(origin, connection, keep=keep)

    @contextmanager
    def following(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        expected: int = 0,
        asked: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Answer]:
        """As ``request``, but yield the answer at the end of the redirects; ``asked`` gets each address before its request.

        Headers that may be credentials are not sent to another origin, and do not come back. Raises also
        ``DowngradeError``, and ``ProtocolError`` after more than ``REDIRECT_LIMIT`` redirects.
        """
        sent = dict(headers)
        for _ in range(REDIRECT_LIMIT + 1):
            asked(url)
            with self.request(method, url, sent, expected=expected) as answer:
                if answer.status not in REDIRECTS:
                    yield answer
                    return
                answer.read(REDIRECT_BODY_LIMIT)
                url, sent = follow(url, sent, answer.headers)
        raise ProtocolError(f"more than {REDIRECT_LIMIT} redirects")

    def close(self) -> None:
        """Close idle connections, and break connections in use: their reader threads fail now, not at their timeout."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with suppress(OSError):
                    connection.break_off()
        for _, connection in idle:
            connection.close()

    def _acquire(self, origin: Origin) -> tuple[Connection, bool]:
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == origin:
                    _, connection = self._idle.pop(place)
                    self._busy.add(connection)
                    return connection, True
        return self._connect(origin), False

    def _release(self, origin: Origin, connection: Connection, *, keep: bool) -> None:
        dropped = connection
        with self._lock:
            self._busy.discard(connection)
            if keep and not self._is_closed:
                self._idle.append((origin, connection))
                if len(self._idle) <= self._idle_limit:
                    return
                _, dropped = self._idle.pop(0)
        dropped.close()

    def _connect(self, origin: Origin) -> Connection:
        self._check_open()
        connection = self._dialer.connect(origin)
        try:
            with self._lock:
                self._check_open()  # again: ``close`` did not see this connection
                self._busy.add(connection)
        except ConnectionAbortedError:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "this program is shutting down")


def reason_of(error: Exception) -> str:
    """Describe a network error without address and headers, which some messages repeat."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "an address or a header cannot be sent"
    return str(error) or type(error).__name__
