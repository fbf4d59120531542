"""A connection of the data plane over TLS, which looks like one without: what would block raises ``BlockingIOError``."""

import socket
import ssl
from contextlib import suppress
from typing import Any, cast


class EncryptedSocket(ssl.SSLSocket):
    """A non-blocking socket after its handshake.

    A ``send`` that would block has encrypted the beginning of its content already. So the next one has to be given the same
    content, or more of it.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Not more than a record, so that nothing decrypted is left where ``epoll`` does not see it."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ANN401, ARG002 - the library's signature
        """A record of it at most. Flags are for packets, and a record is not held back for another."""
        if self.version() is None:  # without TLS, the library would send it as it is
            raise ConnectionAbortedError
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """As of a plain socket; the client is told first that nothing follows. From another thread only in both directions."""
        if how == socket.SHUT_WR:
            with suppress(OSError, ValueError):  # it would wait for the client to say the same
                self.unwrap()
        # That of ``SSLSocket`` ends TLS, and what a worker sent at this moment would go out as it is.
        socket.socket.shutdown(self, how)


def encrypted(connection: socket.socket, context: ssl.SSLContext) -> EncryptedSocket:
    """The same connection, which owns its descriptor from now on, before its handshake."""
    context.sslsocket_class = EncryptedSocket
    return cast("EncryptedSocket", context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False))
