"""New connections: direct or through the operator's proxy, in the clear or in TLS.

``HTTPS_PROXY`` and ``NO_PROXY`` are honoured for https, ``SSL_CERT_FILE`` by OpenSSL itself. With an egress policy, a direct
connection goes to an address that the policy was asked about, and a proxy is not asked for a host that the policy refuses.
"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from bdn.core.egress.rules import EgressPolicy
from bdn.net.guarded_dialing import dial
from bdn.net.http1.connection import Wire
from bdn.net.http1.head import HEAD_LIMIT, ProtocolError, parse_head
from bdn.net.http1.request import Origin


class ProxyRefusedError(ConnectionError):
    """The operator's proxy does not lead where we want to go, or cannot be spoken to."""


@dataclass
class Dialer:
    """Makes connections. ``egress`` is None for our own services, whose addresses are the operator's."""

    timeout_seconds: float
    egress: EgressPolicy | None = None
    _tls: ssl.SSLContext | None = field(default=None, init=False)

    def connect(self, origin: Origin) -> Wire:
        """A fresh connection to where ``origin`` is.

        Raises:
            OSError, ProtocolError: it cannot be made.
            EgressRefusedError: it may not be made.
        """
        scheme, host, port = origin
        if scheme == "http":
            return self._wire(dial(host, port, self.timeout_seconds, self.egress))
        proxy = "" if proxy_bypass(host) else getproxies().get("https", "")
        connected = self._tunnel(proxy, host, port) if proxy else dial(host, port, self.timeout_seconds, self.egress)
        try:
            connected.settimeout(self.timeout_seconds)
            return self._wire(self._context().wrap_socket(connected, server_hostname=host))
        except BaseException:
            connected.close()
            raise

    def _wire(self, connected: socket.socket) -> Wire:
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Wire(connected, self.timeout_seconds)

    def _context(self) -> ssl.SSLContext:
        """Made once, when first needed: reading the authorities takes 20 ms. Two threads may both make one."""
        if self._tls is None:
            context = ssl.create_default_context()
            context.set_alpn_protocols(["http/1.1"])
            self._tls = context
        return self._tls

    def _tunnel(self, proxy: str, host: str, port: int) -> socket.socket:
        """A connection that the proxy has led to the host."""
        if self.egress is not None:
            self.egress.admit(host)
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if via.scheme != "http":
            raise ProxyRefusedError("HTTPS_PROXY must be an http:// address")
        connected = dial(via.hostname or "", via.port or 80, self.timeout_seconds, None)
        try:
            _open_tunnel(Wire(connected, self.timeout_seconds), f"[{host}]" if ":" in host else host, port, via)
        except BaseException:
            connected.close()
            raise
        return connected


def _open_tunnel(wire: Wire, host: str, port: int, proxy: SplitResult) -> None:
    """RFC 9110, section 9.3.6: after a 2xx, everything is the host's."""
    place = f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *_proxy_credentials(proxy), "", ""]
    wire.send("\r\n".join(lines).encode("latin-1"))
    status = parse_head(wire.receive_until(b"\r\n\r\n", HEAD_LIMIT)).status
    if not 200 <= status < 300:
        meaning = http.client.responses.get(status, "")
        raise ProxyRefusedError(errno.ECONNREFUSED, f"the proxy opens no tunnel: {status} {meaning}".strip())
    if wire.has_spare:
        raise ProtocolError("the proxy speaks before the host can")


def _proxy_credentials(proxy: SplitResult) -> list[str]:
    if proxy.username is None:
        return []
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return [f"Proxy-Authorization: Basic {b64encode(pair.encode()).decode()}"]
