"""TLS around played answers, and a CONNECT proxy."""

import contextlib
import socket
import ssl
from threading import Thread

from tests.support.network.raw_server import Play, RawServer, read_head


def over_tls(context: ssl.SSLContext, play: Play) -> Play:
    """The play behind a TLS handshake."""

    def secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as encrypted:
            play(encrypted)

    return secured


class ConnectProxy(RawServer):
    """Answers ``CONNECT`` with a tunnel to ``target``, whatever name was asked for. ``heads`` is what it was sent."""

    def __init__(self, target: tuple[str, int], *, refuse: bytes = b"", connections: int = 1) -> None:
        super().__init__(*[self._play] * connections)
        self._target = target
        self._refuse = refuse
        self.heads: list[str] = []

    @property
    def asked_for(self) -> list[str]:
        """``host:port`` of every CONNECT."""
        return [head.split(" ")[1] for head in self.heads if head.startswith("CONNECT ")]

    def _play(self, client: socket.socket) -> None:
        self.heads.append(read_head(client).decode())
        if self._refuse:
            client.sendall(self._refuse)
            return
        with socket.create_connection(self._target) as server:
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = Thread(target=_pump, args=(server, client))
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until the source ends; then the sink hears the end too."""
    with contextlib.suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
