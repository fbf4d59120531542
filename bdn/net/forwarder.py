"""An HTTP proxy on loopback that sends fixed names to one of our services, for clients whose addresses cannot be set."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from bdn.core.errors import BdnError, InvalidRequestError, UpstreamUnavailableError
from bdn.net.ambient import check_proxies
from bdn.net.client import unreachable_service
from bdn.net.http1.answer import parse_head
from bdn.net.http1.connection import ProtocolError
from bdn.net.http1.pool import check_tunnel, proxy_credentials
from bdn.net.tls import Authorities
from bdn.wire.http_fields import FORWARDED_HOST_HEADER, is_loopback, parse_headers
from bdn.wire.shapes import document_of

_HEAD_BYTES: Final = 64 * 1024
_HEADERS: Final = 200
_PIECE: Final = 64 * 1024
_CONNECT_SECONDS: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}
_HOP_BY_HOP: Final = (
    *("connection", "keep-alive", "proxy-connection", "te", "upgrade"),
    *("proxy-authorization", FORWARDED_HOST_HEADER.lower()),
)


@dataclass(frozen=True)
class Forwarder:
    """Sends requests for ``names`` (authorities, such as ``localhost:8000``) to the service at ``url``.

    The service gets the client's authority in ``BDN-Forwarded-Host``, and ``headers``. All other requests go to their
    own hosts, as a proxy sends them. Proxies of this process's environment are used for both.

    ``on_error`` is called with the error of each request that does not reach the service; the client gets a 502.
    """

    url: str
    names: Collection[str]
    headers: Mapping[str, str] = field(default_factory=dict)
    authorities: Authorities = field(default_factory=Authorities)
    on_error: Callable[[BdnError], None] = lambda _: None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen on a free port of loopback until the block ends. Yields the proxy's address."""
        async with asyncio.TaskGroup() as group:
            clients: set[asyncio.Task[None]] = set()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = group.create_task(self._serve(reader, writer))
                clients.add(task)
                task.add_done_callback(clients.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                server.close()
                for task in clients:
                    task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            try:
                method, url, headers = _parsed(await reader.readuntil(b"\r\n\r\n"))
                target, sent = self._target(url, headers)
                upstream = await self._connected(target, method, sent)
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # the client has gone
            except (asyncio.LimitOverrunError, ValueError) as error:
                refusal = InvalidRequestError(f"not a request to a proxy for http:// addresses: {error}")
                await _answer(writer, "400 Bad Request", refusal)
                return
            except BdnError as error:
                self.on_error(error)
                await _answer(writer, "502 Bad Gateway", error)
                return
            with closing(upstream[1]):
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(_send_body(reader, upstream[1]))
                    with suppress(OSError, EOFError, asyncio.LimitOverrunError):
                        await _send_answer(upstream[0], writer)
                    sending.cancel()

    def _target(self, url: SplitResult, headers: dict[str, str]) -> tuple[SplitResult, dict[str, str]]:
        """Where the request goes, and its headers there."""
        kept = {name: value for name, value in headers.items() if name not in _HOP_BY_HOP} | {"connection": "close"}
        authority = url.netloc.rpartition("@")[2].lower()
        if authority not in self.names:
            return url, kept | {"host": authority}
        own = urlsplit(self.url)
        target = own._replace(path=own.path.rstrip("/") + url.path, query=url.query)
        forwarded = {name.lower(): value for name, value in self.headers.items()}
        return target, kept | forwarded | {"host": own.netloc, FORWARDED_HOST_HEADER.lower(): authority}

    async def _connected(
        self, url: SplitResult, method: str, headers: Mapping[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which the head of the request was sent.

        Raises ``ServiceUnreachableError``, ``UpstreamUnavailableError`` for other hosts, or ``InvalidRequestError`` for
        a proxy that cannot be used.
        """
        address = f"{url.scheme}://{url.netloc}"
        proxy = _proxy_of(url)
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        target = f"{address}{path}" if proxy and url.scheme == "http" else path
        credentials = proxy_credentials(proxy) if proxy and url.scheme == "http" else []
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), *credentials]
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await self._open(url, proxy)
        except (OSError, EOFError, ProtocolError) as error:
            if FORWARDED_HOST_HEADER.lower() in headers:
                raise unreachable_service(self.url, error) from error
            raise UpstreamUnavailableError(address, str(error) or type(error).__name__) from error
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return reader, writer

    async def _open(
        self, url: SplitResult, proxy: SplitResult | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the URL's host or the proxy, with a tunnel for https."""
        host, port = url.hostname or "", url.port or _PORTS[url.scheme]
        trusted = self.authorities.context() if url.scheme == "https" else None
        if proxy is None:
            return await asyncio.open_connection(host, port, ssl=trusted)
        reader, writer = await asyncio.open_connection(proxy.hostname, proxy.port or _PORTS["http"])
        if trusted is not None:
            try:
                place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}", *proxy_credentials(proxy), "", ""]
                writer.write("\r\n".join(lines).encode("latin-1"))
                check_tunnel(parse_head(await reader.readuntil(b"\r\n\r\n")))
                await writer.start_tls(trusted, server_hostname=host)
            except BaseException:
                writer.close()
                raise
        return reader, writer


def _parsed(head: bytes) -> tuple[str, SplitResult, dict[str, str]]:
    """Method, URL and headers of a request to a proxy. Raises ``ValueError``, also for ``CONNECT``."""
    line, _, _ = head.partition(b"\r\n")
    method, target, _ = line.decode("ascii").split(" ")
    url = urlsplit(target)
    if url.scheme != "http" or not url.hostname or url.port == 0:
        raise ValueError(f"{method} {target[:200]}")
    return method, url, parse_headers(head, len(line) + 2, _HEADERS, "the request")


def _proxy_of(url: SplitResult) -> SplitResult | None:
    """The environment's proxy for this URL; None: connect directly.

    Raises ``InvalidRequestError``: it cannot be used.
    """
    host, known = url.hostname or "", getproxies_environment()
    address = known.get(url.scheme) or known.get("all")
    if not address or is_loopback(host) or proxy_bypass(url.netloc):
        return None
    check_proxies()
    return urlsplit(address if "://" in address else f"http://{address}")


async def _send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the request's body. When the client leaves, the connection to the host is closed.

    When the host stops reading, the connection stays open: the host's answer says why.
    """
    with suppress(OSError):
        await _copy(reader, writer)
        writer.close()


async def _send_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the host's answer, which says that the connection ends, whatever the host says.

    Otherwise the client would send its next request here, with its token, and it would reach this host.
    """
    is_interim = True
    while is_interim:
        line, _, headers = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        is_interim = line.startswith(b"HTTP/1.1 1")
        writer.write(b"".join([line, b"\r\n" if is_interim else b"\r\nConnection: close\r\n", headers]))
    await _copy(reader, writer)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()


async def _answer(writer: asyncio.StreamWriter, status: str, error: BdnError) -> None:
    content = json.dumps(document_of(error, is_flat=True)).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    await writer.drain()
