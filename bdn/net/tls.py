"""TLS contexts of our own programs: server certificates and client trust.

Certificate files are checked for changes at use, so that certificates change without a restart. docs/adr/0049 explains
why clients show no certificates, and how the kernel encrypts chunks.
"""

import errno
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bdn.core.errors import InvalidRequestError
from bdn.net.ambient import check_authorities
from bdn.wire.shapes import document_of

logger = logging.getLogger(__name__)
HANDSHAKE: Final = 0x16  # the first byte of a TLS connection (RFC 8446, section 5.1), and of no HTTP request
_LOOK_SECONDS: Final = 1.0
_ENABLE_KTLS: Final = 1 << 3  # ``OP_ENABLE_KTLS`` of Python 3.12 and OpenSSL 3: hand the keys to the kernel
_SOL_TLS: Final = 282  # linux/socket.h
_TLS_TX: Final = 1  # linux/tls.h
_CRYPTO_INFO_BYTES: Final = 4  # version and cipher
_NO_SENDFILE: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL})
# Encrypted per call: buffers of this size are reused by malloc; larger ones are mapped anew.
_READ_BYTES: Final = 64 * 1024
_PROTOCOLS: Final = ["http/1.1"]
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})

SPEAKS_TLS: Final = "this port speaks TLS: use an address that begins with https://"
SPEAKS_PLAIN_HTTP: Final = "this port speaks plain HTTP: use an address that begins with http://"


def refusal_of_plain_http() -> bytes:
    """The last response of a plain HTTP connection to a TLS port, whatever the request."""
    content = json.dumps(document_of(InvalidRequestError(SPEAKS_TLS))).encode()
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + content


class _ContextOfFiles:
    """A context that ``make`` creates anew when one of its files changes.

    If that fails, the previous context stays, with one log line. A context in use is never changed: for a moment it
    would show one certificate and have the key of another.

    Thread-safe. The files are checked at use, at most once a second. A file has changed when it was replaced, rewritten
    or given another owner or mode, or when a link leads to another file.
    """

    def __init__(self, files: Sequence[Path], make: Callable[[], ssl.SSLContext], clock: Callable[[], float]) -> None:
        """Raises ``InvalidRequestError`` with the reason when the files cannot be used."""
        self._files = files
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._looks_at = clock() + _LOOK_SECONDS
        self._seen = self._refused = self._look()  # before reading: a change during the read is read again
        self._context = make()

    def context(self) -> ssl.SSLContext:
        if self._clock() >= self._looks_at and self._lock.acquire(blocking=False):
            try:
                self._looks_at = self._clock() + _LOOK_SECONDS
                self._renew()
            finally:
                self._lock.release()
        return self._context

    def _renew(self) -> None:
        if (seen := self._look()) == self._seen:
            return
        try:
            self._context, self._seen = self._make(), seen
        except InvalidRequestError as error:  # tried again: a wrong clock or a lack of memory passes without a change
            if seen != self._refused:
                logger.warning("cannot reload changed TLS files: %s; keeping what was loaded before", error)
            self._refused = seen
        else:
            logger.info("changed TLS files loaded", extra={"files": ", ".join(map(str, self._files))})

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self._files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


class Certificate(_ContextOfFiles):
    """A server's certificate: chain and key in two PEM files. ``prefix`` begins the names of their settings."""

    def __init__(self, prefix: str, chain: Path, key: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.expires_at = 0.0  # seconds since the epoch; of the certificate that new connections get
        self._paths = prefix, chain, key
        super().__init__((chain, key), self._load, clock)

    def _load(self) -> ssl.SSLContext:
        prefix, chain, key = self._paths
        expires_at = valid_until(f"{prefix}_CERT", chain)
        context = _server_context(prefix, chain, key)
        self.expires_at = expires_at  # only now: a certificate that is refused is not in use
        return context


def _server_context(prefix: str, chain: Path, key: Path) -> ssl.SSLContext:
    _read(f"{prefix}_KEY", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    # Our clients never resume sessions, and would take tickets after a handshake for the beginning of a response.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if ssl.OPENSSL_VERSION_INFO >= (3,):
        context.options |= _ENABLE_KTLS  # no effect where kernel, OpenSSL or cipher does not support it
    try:
        # Without this callback, OpenSSL would prompt the terminal for a passphrase.
        context.load_cert_chain(chain, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidRequestError(f"{prefix}_KEY: {key} {_wrong_with_key(error)}") from None
    except OSError as error:  # it was readable a moment ago
        raise InvalidRequestError(f"{prefix}_KEY: {key} cannot be read: {error.strerror}") from None
    return context


def certificate(prefix: str, chain: Path | None, key: Path | None) -> Certificate | None:
    """The certificate of two settings; None if neither is set. Blocking. Raises ``InvalidRequestError`` if unusable."""
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


def valid_until(setting: str, file: Path) -> float:
    """The end of a certificate that is valid now, in seconds since 1970. Raises ``InvalidRequestError`` otherwise."""
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
            f"{setting}: the certificate in {file} is valid from {since} to {until}, and not now; replace it, or correct this machine's clock"
        )
    return first.not_valid_after_utc.timestamp()


def _wrong_with_key(error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return "is not the key of the certificate; set the private key that the certificate was made for"
    return "holds no key in PEM without a passphrase; openssl pkey -in FILE -out NEW makes one"


class Authorities:
    """Trust of clients of our own services: the authorities in ``file``, or the system's, loaded on first use.

    Two contexts: httpcore2 changes a context (ALPN) for each connection of an event loop, which must not happen while
    OpenSSL reads the context for a byte thread.
    """

    def __init__(
        self, file: Path | None = None, clock: Callable[[], float] = time.monotonic, *, setting: str = "BDN_TLS_CA"
    ) -> None:
        """Raises ``InvalidRequestError``, with the setting's name, when the file cannot be used. Blocking."""
        self._own = (
            None
            if file is None
            else [_ContextOfFiles((file,), partial(_context_of_authorities, setting, file), clock) for _ in range(2)]
        )
        self._systems: list[ssl.SSLContext | None] = [None, None]

    def context(self, *, is_for_threads: bool = False) -> ssl.SSLContext:
        """The context for a new connection; the same object while the file is unchanged.

        ``is_for_threads``: not for an event loop. Raises ``InvalidRequestError``: the system's authorities cannot be
        read.
        """
        if self._own is not None:
            return self._own[is_for_threads].context()
        found = self._systems[is_for_threads] = self._systems[is_for_threads] or _client_context(None)
        return found


def _context_of_authorities(setting: str, file: Path) -> ssl.SSLContext:
    _read(setting, file)
    try:
        return _client_context(file)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequestError(f"{setting}: {file} holds no certificates of authorities in PEM ({error})") from None


def _client_context(file: Path | None) -> ssl.SSLContext:
    """The system's authorities, or those in SSL_CERT_FILE, take 20 ms to load. OpenSSL ignores an unreadable file."""
    if file is None:
        check_authorities(os.environ)
    context = ssl.create_default_context(cafile=None if file is None else os.fspath(file))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_PROTOCOLS)
    return context


def failure_of_tls(error: BaseException) -> ssl.SSLError | None:
    """The TLS failure in the causes of this error, if any."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause


TRUST_ADVICE: Final = "set BDN_TLS_CA to a file with the authority that signed its certificate; the certificate has to be valid now, and to name this host"


def advice_on(failure: ssl.SSLError | None) -> str:
    """The remedy; "" without a failure, or where its message suffices."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return TRUST_ADVICE
    return SPEAKS_PLAIN_HTTP if failure is not None and failure.reason in _NOT_TLS else ""


def kernel_encrypts(connection: socket.socket) -> bool:
    """Whether the kernel encrypts what is sent on this socket, with ``sendfile`` as well.

    Only such a socket has the option.
    """
    try:
        return any(connection.getsockopt(_SOL_TLS, _TLS_TX, _CRYPTO_INFO_BYTES))
    except OSError:  # EOPNOTSUPP or ENOPROTOOPT: no kernel TLS; EBUSY: not for this direction
        return False


def send_file(connection: socket.socket, descriptor: int, offset: int, size: int) -> int:
    """Send part of a file; 0 at its end. Over TLS ``sendfile`` would send plaintext, unless the kernel encrypts."""
    if not isinstance(connection, ssl.SSLSocket) or kernel_encrypts(connection):
        try:
            return os.sendfile(connection.fileno(), descriptor, offset, size)
        except OSError as error:  # from a sandbox, or from a file system without page cache
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
