"""Persistent HTTP connections for byte threads: plain blocking sockets, so that a body lands in our buffer in one copy.

A name is resolved once, within a time; every address is checked by the egress policy, and the connection goes to one that was.
``HTTPS_PROXY`` and ``NO_PROXY`` are honoured for https; a proxy is not asked for a host that the policy refuses.

docs/adr/0010 has the figures: why no asyncio client carries bytes; docs/adr/0007 why ``http.client`` and h11 do not.
"""

import errno
import http.client
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from bdn.core.egress import EgressPolicy
from bdn.net.host_lookups import HOST_LOOKUPS, AddressInfo, Question
from bdn.net.http1.answer import HEAD_LIMIT, Answer, AnswerDeadline, ask, parse_head
from bdn.net.http1.connection import (
    Body,
    Connection,
    NoAnswerError,
    Origin,
    ProtocolError,
    format_request,
    split_address,
)
from bdn.net.tls import Authorities


def resolve(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> Sequence[AddressInfo]:
    """A host's addresses in the resolver's order, each admitted by the policy if there is one. Blocking.

    ``EgressRefusedError``: the host or one of its addresses is refused; ``OSError``: the name does not resolve in time.
    """
    asked = host if policy is None else policy.admit(host)
    found = HOST_LOOKUPS.find(Question(asked, port, kind=socket.SOCK_STREAM), timeout_seconds)
    if policy is not None:
        policy.admit_resolved(host, (str(info[4][0]) for info in found))
    return found


def dial(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> socket.socket:
    """A connection to one of the host's addresses, tried in the resolver's order; the caller closes it.

    ``timeout_seconds`` are for the name, and for each address. Without a policy, every address is allowed.

    ``EgressRefusedError``: the host or one of its addresses is refused, and nothing was sent to any. ``OSError``: the name
    does not resolve, or no address answers (the last one's error).
    """
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in resolve(host, port, timeout_seconds, policy):
        try:
            return _connect(family, kind, protocol, address, timeout_seconds)
        except OSError as error:
            failure = error
    raise failure


def _connect(family: int, kind: int, protocol: int, address: Any, timeout_seconds: float | None) -> socket.socket:  # noqa: ANN401 - see AddressInfo
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(family, kind, protocol))
        connection.settimeout(timeout_seconds)
        connection.connect(address)
        stack.pop_all()
    return connection


def https_proxy(host: str) -> str | None:
    """The proxy that ``HTTPS_PROXY``, else ``ALL_PROXY``, and ``NO_PROXY`` name now for a host requested over https; None: connect directly."""
    named = {} if proxy_bypass(host) else getproxies()
    proxy = named.get("https") or named.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


class ProxyRefusedError(ConnectionError):
    """The operator's proxy opens no tunnel, or its address cannot be used."""


@dataclass
class Dialer:
    """Makes connections. ``egress`` is None for our own services, whose addresses are the operator's; ``authorities`` are for https."""

    timeout_seconds: float
    egress: EgressPolicy | None = None
    authorities: Authorities = field(default_factory=Authorities)

    def connect(self, origin: Origin) -> Connection:
        """A new connection. ``OSError``, ``ProtocolError``: it cannot be made; ``EgressRefusedError``: it may not be."""
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
        """A connection through the proxy to the host."""
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
    """Ask with CONNECT: after a 2xx, every byte is the host's (RFC 9110, section 9.3.6)."""
    place = f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *_proxy_credentials(proxy), "", ""]
    connection.send("\r\n".join(lines).encode("latin-1"))
    status = parse_head(connection.receive_until(b"\r\n\r\n", HEAD_LIMIT)).status
    if not 200 <= status < 300:
        meaning = http.client.responses.get(status, "")
        raise ProxyRefusedError(errno.ECONNREFUSED, f"the proxy opens no tunnel: {status} {meaning}".strip())
    if connection.has_spare:
        raise ProtocolError("the proxy sent bytes before the host could")


def _proxy_credentials(proxy: SplitResult) -> list[str]:
    if proxy.username is None:
        return []
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return [f"Proxy-Authorization: Basic {b64encode(pair.encode()).decode()}"]


# ValueError: an address or a header that no request can hold.
NETWORK_ERRORS: Final = (OSError, ProtocolError, ValueError)


class ConnectionPool:
    """Idle connections by origin. A connection is used by one thread at a time and kept only after a clean answer.

    ``idle_limit`` bounds the idle ones of all origins together; those of the origin that was not used for longest go first.
    ``egress`` says where connections may lead; None is for our own services. ``authorities`` are those of the system where none
    are given. A connection stays as long as it is used, whatever becomes of what was believed when it was made.
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
        self._idle: dict[Origin, list[Connection]] = {}  # the origin used last stands last
        self._idle_count = 0
        self._busy: set[Connection] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def get(
        self, url: str, headers: Mapping[str, str], expected: int = 0, deadline: AnswerDeadline | None = None
    ) -> AbstractContextManager[Answer]:
        """Send a GET, as ``request`` does."""
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
        """Send a request and yield the answer's head; the caller reads the body, of about ``expected`` bytes where that is known.

        ``deadline`` judges the wait for an answer to begin, instead of the pool's timeout.

        The connection is kept when the body was read to its end, and closed otherwise. An idle connection that the server
        closed meanwhile is replaced once, silently: nothing of the answer had arrived (RFC 9110, section 9.2.2). A DELETE is
        not sent again so: it may have been carried out, and somebody may have put anew what it would take.

        ``NETWORK_ERRORS``: whatever the network does; ``EgressRefusedError``: the address may not be contacted; ``EOFError``: the
        file of a ``FileBody`` ends before its part does.
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

    def close(self) -> None:
        """Close every idle connection, and break those in use: their readers fail now, not when their time is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle, self._idle_count = self._idle, {}, 0
            for connection in self._busy:
                with suppress(OSError):
                    connection.break_off()
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _acquire(self, origin: Origin) -> tuple[Connection, bool]:
        with self._lock:
            idle = self._idle.get(origin)
            if idle:
                connection = idle.pop()
                self._idle_count -= 1
                if not idle:
                    del self._idle[origin]
                self._busy.add(connection)
                return connection, True
        return self._connect(origin), False

    def _release(self, origin: Origin, connection: Connection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and self._idle_limit and not self._is_closed:
                dropped = self._drop_oldest() if self._idle_count >= self._idle_limit else None
                idle = self._idle.pop(origin, [])
                idle.append(connection)
                self._idle[origin] = idle
                self._idle_count += 1
            else:
                dropped = connection
        if dropped is not None:
            dropped.close()

    def _drop_oldest(self) -> Connection:
        origin, idle = next(iter(self._idle.items()))
        oldest = idle.pop(0)
        if not idle:
            del self._idle[origin]
        self._idle_count -= 1
        return oldest

    def _connect(self, origin: Origin) -> Connection:
        self._check_open()
        connection = self._dialer.connect(origin)
        try:
            with self._lock:
                self._check_open()  # again: ``close`` could not see this one
                self._busy.add(connection)
        except ConnectionAbortedError:
            connection.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "this program is ending")


def reason_of(error: Exception) -> str:
    """What the network did, without the address and the headers, which some messages repeat."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "an address or a header cannot be sent"
    return str(error) or type(error).__name__
