"""TLS between our own programs: what a server shows, and whom a client believes. All contexts are made here.

Their files are looked at again when they are used, so that certificates change without a restart. docs/adr/0049 says why clients show
no certificates, and how the kernel comes to encrypt chunks.
"""

import errno
import json
import logging
import os
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.net.ambient import check_authorities
from bdn.wire.shapes import document_of

logger = logging.getLogger(__name__)
HANDSHAKE: Final = 0x16  # the first byte of a connection over TLS (RFC 8446, section 5.1), and of no request
_LOOK_SECONDS: Final = 1.0
_ENABLE_KTLS: Final = 1 << 3  # ``OP_ENABLE_KTLS`` of Python 3.12, and of OpenSSL 3: the kernel may be given the keys
_SOL_TLS: Final = 282  # linux/socket.h
_TLS_TX: Final = 1  # linux/tls.h
_CRYPTO_INFO_BYTES: Final = 4  # version and cipher
_NO_SENDFILE: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL})
_READ_BYTES: Final = 64 * 1024  # to be encrypted: memory of this size is used again; more is asked of the kernel anew
_PROTOCOLS: Final = ["http/1.1"]
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})

SPEAKS_TLS: Final = "this port speaks TLS: its address begins with https://"
SPEAKS_PLAIN_HTTP: Final = "this port speaks plain HTTP: its address begins with http://"


def refusal_of_plain_http() -> bytes:
    """What a client of plain HTTP is answered at a port of TLS, whatever it asked; the last answer of its connection."""
    content = json.dumps(document_of(InvalidRequestError(SPEAKS_TLS))).encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + content


class _ContextOfFiles(ABC):
    """A context that is made anew when one of its files changes. While that fails, the one before stays; a line of the log says so once.

    From any thread. The files are looked at when it is used, once a second at most. A file that is replaced, rewritten or given
    another owner or mode has changed, and so has one that a link leads to now.
    """

    def __init__(self, files: Sequence[Path], clock: Callable[[], float]) -> None:
        """Raises ``InvalidRequestError``: the files cannot be used, and why."""
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._looks_at = clock() + _LOOK_SECONDS
        self._seen = self._look()  # before they are read: what changes meanwhile is read again
        self._refused = self._seen  # of what the log has told
        self._context = self._made()

    def context(self) -> ssl.SSLContext:
        """For a new connection."""
        if self._clock() >= self._looks_at and self._lock.acquire(blocking=False):
            try:
                self._looks_at = self._clock() + _LOOK_SECONDS
                self._renew()
            finally:
                self._lock.release()
        return self._context

    @abstractmethod
    def _made(self) -> ssl.SSLContext:
        """Raises ``InvalidRequestError``."""

    def _renew(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        try:
            self._context = self._made()
        except (
            InvalidRequestError
        ) as error:  # it may pass, though no file changes: the clock is set, memory is free again
            if seen != self._refused:
                logger.warning("what was read before stays in use: %s", error)
            self._refused = seen
        else:
            self._seen = seen
            logger.info("changed files are in use", extra={"files": ", ".join(map(str, self._files))})

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self._files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


class Certificate(_ContextOfFiles):
    """What a server shows: the chain in one file and its key in another, both PEM. ``prefix`` begins the names of their settings."""

    def __init__(self, prefix: str, chain: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = prefix
        self._chain = chain
        self._key = key
        super().__init__((chain, key), clock)

    def _made(self) -> ssl.SSLContext:
        _check_validity(f"{self._prefix}_CERT", self._chain)
        _read(f"{self._prefix}_KEY", self._key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_PROTOCOLS)
        # Our clients resume nothing, and would take the tickets that follow a handshake for the beginning of an answer.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        if ssl.OPENSSL_VERSION_INFO >= (3,):
            context.options |= _ENABLE_KTLS  # it is without effect where kernel, OpenSSL or cipher cannot
        try:
            # Without a passphrase of ours, OpenSSL would ask the terminal for one.
            context.load_cert_chain(self._chain, self._key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise InvalidRequestError(f"{self._prefix}_KEY: {self._key} {_wrong_with_key(error)}") from None
        except OSError as error:  # it could be read a moment ago
            raise InvalidRequestError(f"{self._prefix}_KEY: {self._key} cannot be read: {error.strerror}") from None
        return context


def certificate(prefix: str, chain: Path | None, key: Path | None) -> Certificate | None:
    """That of two settings; None where none is set. Blocking. Raises ``InvalidRequestError``: it cannot be used."""
    if chain is None and key is None:
        return None
    if chain is None or key is None:
        given, lacking = ("KEY", "CERT") if chain is None else ("CERT", "KEY")
        raise InvalidRequestError(
            f"{prefix}_{given} needs {prefix}_{lacking}: set both for TLS, the certificate with its chain and the key, or none"
        )
    return Certificate(prefix, chain, key)


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{setting}: {file} cannot be read: {error.strerror or error}") from None


def _check_validity(setting: str, file: Path) -> None:
    """Refuse what every client would refuse."""
    from cryptography import x509  # noqa: PLC0415 - most commands serve nothing

    try:
        first = x509.load_pem_x509_certificates(_read(setting, file))[0]
    except ValueError:
        raise InvalidRequestError(
            f"{setting}: {file} holds no certificate in PEM; it begins with -----BEGIN CERTIFICATE-----"
        ) from None
    if not first.not_valid_before_utc.timestamp() <= time.time() < first.not_valid_after_utc.timestamp():
        since, until = first.not_valid_before_utc.isoformat(), first.not_valid_after_utc.isoformat()
        raise InvalidRequestError(
            f"{setting}: the certificate in {file} is valid from {since} to {until}, and not now; put a new one there, or set the clock"
        )


def _wrong_with_key(error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return "is not the key of the certificate; give the one that the certificate was made for"
    return "holds no key in PEM without a passphrase; openssl pkey -in FILE -out NEW makes one"


class _ServiceAuthorities(_ContextOfFiles):
    def _made(self) -> ssl.SSLContext:
        (file,) = self._files
        _read("BDN_TLS_CA", file)
        try:
            return _client_context(file)
        except (ssl.SSLError, OSError) as error:
            raise InvalidRequestError(
                f"BDN_TLS_CA: {file} holds no certificates of authorities in PEM ({error})"
            ) from None


class Authorities:
    """Whom a client of our own services believes: the authorities in ``file``, or those of the system, read when first needed.

    In two contexts: httpcore2 sets what a context offers (ALPN) with each connection of an event loop, which must not happen
    while OpenSSL reads it for a byte thread.
    """

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ``InvalidRequestError``: the file cannot be used. Blocking."""
        self._own = None if file is None else [_ServiceAuthorities((file,), clock) for _ in range(2)]
        self._systems: list[ssl.SSLContext | None] = [None, None]

    def context(self, *, is_for_threads: bool = False) -> ssl.SSLContext:
        """For a new connection of an event loop, or of any thread. The same object, as long as the file is the same.

        Raises ``InvalidRequestError``: the certificate authorities of the system cannot be read.
        """
        if self._own is not None:
            return self._own[is_for_threads].context()
        found = self._systems[is_for_threads] = self._systems[is_for_threads] or _client_context(None)
        return found


def _client_context(file: Path | None) -> ssl.SSLContext:
    """The system's authorities, or those in SSL_CERT_FILE, take 20 ms to load. OpenSSL ignores an unreadable file."""
    if file is None:
        check_authorities(os.environ)
    context = ssl.create_default_context(cafile=None if file is None else os.fspath(file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    return context


def failure_of_tls(error: BaseException) -> ssl.SSLError | None:
    """The failure of TLS that led to this error, if one did."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


TRUST_ADVICE: Final = "BDN_TLS_CA has to name a file with the authority that signed its certificate, which has to be valid and to name this host"


def advice_on(failure: ssl.SSLError | None) -> str:
    """What to do about it; empty where the failure says it all, or where there is none."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return TRUST_ADVICE
    return SPEAKS_PLAIN_HTTP if failure is not None and failure.reason in _NOT_TLS else ""


def kernel_encrypts(connection: socket.socket) -> bool:
    """Whether the kernel encrypts what is sent here, by ``sendfile`` as well. Only a socket whose keys it has answers this."""
    try:
        return any(connection.getsockopt(_SOL_TLS, _TLS_TX, _CRYPTO_INFO_BYTES))
    except OSError:  # EOPNOTSUPP or ENOPROTOOPT: it has none; EBUSY: not for this direction
        return False


def send_file(connection: socket.socket, descriptor: int, offset: int, size: int) -> int:
    """Some of it; 0: the file has no more. Over TLS ``sendfile`` would send it as it is, unless the kernel encrypts."""
    if not isinstance(connection, ssl.SSLSocket) or kernel_encrypts(connection):
        try:
            return os.sendfile(connection.fileno(), descriptor, offset, size)
        except OSError as error:  # of a sandbox, or of a file system that has no pages to send
            if error.errno not in _NO_SENDFILE:
                raise
    piece, sent = memoryview(os.pread(descriptor, min(size, _READ_BYTES), offset)), 0
    try:
        while sent < len(piece):
            sent += connection.send(piece[sent:])
    except BlockingIOError:
        if not sent:
            raise
    return sent
