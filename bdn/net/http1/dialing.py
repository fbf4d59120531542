"""New connections of byte threads: to addresses that the egress policy admits, direct or through the operator's proxy.

A name is resolved once, within a time; every address is checked, and the connection goes to one that was. ``HTTPS_PROXY`` and
``NO_PROXY`` are honoured for https, ``SSL_CERT_FILE`` by OpenSSL itself; a proxy is not asked for a host that the policy refuses.
"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from base64 import b64encode
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from bdn.core.egress import EgressPolicy
from bdn.net.host_lookups import HOST_LOOKUPS, AddressInfo, Question
from bdn.net.http1.answer import HEAD_LIMIT, parse_head
from bdn.net.http1.connection import Connection, ProtocolError
from bdn.net.http1.request import Origin


def resolve(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> Sequence[AddressInfo]:
    """A host's addresses in the resolver's order, each admitted by the policy if there is one. Blocking.

    Raises:
        EgressRefusedError: the host or one of its addresses is refused.
        OSError: the name does not resolve, or not in time.
    """
    asked = host if policy is None else policy.admit(host)
    found = HOST_LOOKUPS.find(Question(asked, port, kind=socket.SOCK_STREAM), timeout_seconds)
    if policy is not None:
        policy.admit_resolved(host, (str(info[4][0]) for info in found))
    return found


def dial(host: str, port: int, timeout_seconds: float | None, policy: EgressPolicy | None) -> socket.socket:
    """A connection to one of the host's addresses, tried in the resolver's order; the caller closes it.

    ``timeout_seconds`` are for the name, and for each address. Without a policy, every address is allowed.

    Raises:
        EgressRefusedError: the host or one of its addresses is refused; nothing was sent to any of them.
        OSError: the name does not resolve, or no address answers (the last one's error).
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


class ProxyRefusedError(ConnectionError):
    """The operator's proxy opens no tunnel, or its address cannot be used."""


@dataclass
class Dialer:
    """Makes connections. ``egress`` is None for our own services, whose addresses are the operator's."""

    timeout_seconds: float
    egress: EgressPolicy | None = None
    _tls: ssl.SSLContext | None = field(default=None, init=False)

    def connect(self, origin: Origin) -> Connection:
        """A new connection to the origin.

        Raises:
            OSError, ProtocolError: it cannot be made.
            EgressRefusedError: it may not be made.
        """
        scheme, host, port = origin
        if scheme == "http":
            return self._open(dial(host, port, self.timeout_seconds, self.egress))
        proxy = "" if proxy_bypass(host) else getproxies().get("https", "")
        connected = self._tunnel(proxy, host, port) if proxy else dial(host, port, self.timeout_seconds, self.egress)
        try:
            connected.settimeout(self.timeout_seconds)
            return self._open(self._context().wrap_socket(connected, server_hostname=host))
        except BaseException:
            connected.close()
            raise

    def _open(self, connected: socket.socket) -> Connection:
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(connected, self.timeout_seconds)

    def _context(self) -> ssl.SSLContext:
        """Made once, when first needed: reading the authorities takes 20 ms. Two threads may both make one."""
        if self._tls is None:
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1"])
            self._tls = context
        return self._tls

    def _tunnel(self, proxy: str, host: str, port: int) -> socket.socket:
        """A connection through the proxy to the host."""
        if self.egress is not None:
            self.egress.admit(host)
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
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
