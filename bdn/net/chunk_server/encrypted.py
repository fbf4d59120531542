"""A non-blocking TLS socket with the behaviour of a plain one: calls that would block raise ``BlockingIOError``."""

import socket
import ssl
from contextlib import suppress
from typing import Any, cast


class EncryptedSocket(ssl.SSLSocket):
    """A non-blocking socket after its handshake.

    A ``send`` that would block has already encrypted the beginning of its content, so the next ``send`` must begin with
    the same content.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive at most one record, so that no decrypted bytes remain where ``epoll`` does not see them."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ANN401, ARG002 - the library's signature
        """Send at most one record. Ignores flags, which are for packets: no record is held back for another."""
        if self.version() is None:  # without TLS, the library would send plaintext
            raise ConnectionAbortedError
        try:
            return super().send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """Like a plain socket's; notifies the client of the end first. From another thread only for both directions."""
        if how == socket.SHUT_WR:
            with suppress(OSError, ValueError):  # unwrap would wait for the client's close_notify
                self.unwrap()
        # Not ``SSLSocket.shutdown``: it ends TLS, and a concurrent ``send`` of a worker would go out as plaintext.
        socket.socket.shutdown(self, how)


def encrypted(connection: socket.socket, context: ssl.SSLContext) -> EncryptedSocket:
    """Wrap a connection, before its handshake. Takes ownership of its descriptor."""
    context.sslsocket_class = EncryptedSocket
    return cast("EncryptedSocket", context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False))
