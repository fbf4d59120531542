"""Persistent HTTP connections for byte threads: plain blocking sockets, so that a body lands in our buffer in one copy.

``http.client`` reads into a given buffer and releases the GIL while it waits; see *Measured* in ARCHITECTURE for why no
asyncio client carries bytes.
"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

Origin = tuple[str, str, int]
NETWORK_ERRORS: Final = (
    OSError,
    http.client.HTTPException,
    ValueError,
)  # ValueError: an address or header nobody can send


def origin_of(url: SplitResult) -> Origin:
    """Scheme, host and port: what a connection and a credential belong to."""
    return url.scheme, url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


class ConnectionPool:
    """Idle connections by origin. A connection is used by one thread at a time and kept only after a clean answer.

    ``HTTPS_PROXY`` and ``NO_PROXY`` are honoured for https, ``SSL_CERT_FILE`` by OpenSSL itself.
    """

    def __init__(self, *, timeout_seconds: float, idle_limit: int = 64) -> None:
        self._timeout_seconds = timeout_seconds
        self._idle_limit = idle_limit
        self._idle: dict[Origin, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    @contextmanager
    def get(self, url: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Send a GET and yield the answer's head; the caller reads the body.

        The connection is kept when the body was read to its end, and closed otherwise. An idle connection that the server
        closed meanwhile is replaced once, silently: nothing of the answer had arrived (RFC 9110, section 9.2.2).

        Raises:
            NETWORK_ERRORS: whatever the network does; see ``reason_of``.
        """
        parts = urlsplit(url)
        origin = origin_of(parts)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection, reused = self._take(origin)
        keep = False
        try:
            try:
                response = self._ask(connection, target, headers)
            except (http.client.RemoteDisconnected, ConnectionError):
                if not reused or self._is_closed:
                    raise
                self._give_back(origin, connection, keep=False)
                connection = self._connect(origin)
                response = self._ask(connection, target, headers)
            try:
                yield response
                keep = response.isclosed() and not response.will_close
            finally:
                response.close()  # after ``Connection: close`` the socket is the answer's
        finally:
            self._give_back(origin, connection, keep=keep)

    def close(self) -> None:
        """Close every idle connection, and break those in use: their readers fail now, not when their time is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
            for connection in self._busy:
                if connection.sock is not None:
                    with suppress(OSError):
                        # The socket's own: that of a TLS socket would make its reader take ciphertext for content.
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _take(self, origin: Origin) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            idle = self._idle.get(origin)
            if idle:
                connection = idle.pop()
                self._busy.add(connection)
                return connection, True
        return self._connect(origin), False

    def _give_back(self, origin: Origin, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            idle = self._idle.setdefault(origin, [])
            if keep and len(idle) < self._idle_limit and not self._is_closed:
                idle.append(connection)
                return
        connection.close()

    def _connect(self, origin: Origin) -> http.client.HTTPConnection:
        connection = self._new(origin)
        with self._lock:
            if self._is_closed:
                raise _ending()
            self._busy.add(connection)
        return connection

    def _ask(
        self, connection: http.client.HTTPConnection, target: str, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection.request("GET", target, headers={"Accept-Encoding": "identity", **headers})
        if self._is_closed:  # while we were connecting, ``close`` could not see our socket, and did not break it
            raise _ending()
        return connection.getresponse()

    def _new(self, origin: Origin) -> http.client.HTTPConnection:
        scheme, host, port = origin
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_seconds)
        if scheme != "https":
            msg = f"cannot read from a {scheme}:// address"
            raise http.client.InvalidURL(msg)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        proxy = "" if proxy_bypass(host) else getproxies().get("https", "")
        if not proxy:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_seconds, context=self._tls)
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        connection = http.client.HTTPSConnection(
            via.hostname or "", via.port or 80, timeout=self._timeout_seconds, context=self._tls
        )
        connection.set_tunnel(host, port, _proxy_credentials(via))
        return connection


def _ending() -> ConnectionAbortedError:
    return ConnectionAbortedError(errno.ECONNABORTED, "this program is ending")


def _proxy_credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def reason_of(error: Exception) -> str:
    """What the network did, without the address and the headers, which some messages of ``http.client`` repeat."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, http.client.InvalidURL | ValueError) and not isinstance(error, OSError):
        return "an address or a header cannot be sent"
    return str(error) or type(error).__name__


def read_exactly(response: http.client.HTTPResponse, buffer: memoryview) -> int:
    """Fill ``buffer`` from the body; returns the bytes read, fewer only when the body ended early."""
    done = 0
    while done < len(buffer):
        count = response.readinto(buffer[done:])
        if not count:
            break
        done += count
    return done
