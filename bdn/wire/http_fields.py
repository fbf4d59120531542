"""Paths, headers, byte ranges and retry times in HTTP messages."""

import email.utils
import ipaddress
import re
import time
from datetime import UTC
from typing import Final
from urllib.parse import urlsplit

from bdn.core.chunk import ByteRange, Digest
from bdn.core.errors import ForeignRequestError
from bdn.core.source.upstream import Headers

SUSPECT_HEADER: Final = (
    "BDN-Suspect"  # of a chunk request: the chunk's content was wrong, so verify it before sending it again
)
_ONE_RANGE = re.compile(r"bytes=\s*([0-9]{0,30})-([0-9]{0,30})\s*", re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,30})-([0-9]{1,30})/([0-9]{1,30})")
TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_HEADER_LINES: Final = re.compile(rb"(?:%s:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+" % TOKEN)
_AUTHORITY: Final = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]*)?")
_NAME: Final = r"b3(?::|%3[Aa])([0-9a-f]{64})"
_CHUNK_PATH: Final = re.compile(f"/chunks/{_NAME}")
_PUSH_PATH: Final = re.compile(f"/pushes/(mir_[0-9a-f]{{24}})/chunks/{_NAME}")

LONGEST_WAIT_SECONDS: Final = 60.0  # the longest that one request may ask to be held open
LONGEST_SOURCE: Final = 4096  # characters of a source to search for: SQLite accepts no pattern above 50,000 bytes
MEDIA_CHUNK: Final = "application/octet-stream"
MEDIA_JSON: Final = "application/json"
MANIFEST_HEADER: Final = "BDN-Manifest"  # of a chunk request: fetch the chunk if you do not hold it, because you own it
AGENT_HEADER: Final = "BDN-Agent-Token"  # of an agent that commits with a job's grant
DATA_PORT_HEADER: Final = "BDN-Data-Port"  # of a manifest: the mirror's port for chunks; absent: its API's port
DELIVERY_HEADER: Final = (
    "BDN-Delivery"  # of a manifest: ``direct`` if agents read the bucket themselves; absent: ``proxy``
)
ORGANISATION_HEADER: Final = (
    "BDN-Organisation"  # of an operator's call: for this organisation instead of the token's own
)
FORWARDED_HOST_HEADER: Final = "BDN-Forwarded-Host"  # of a forwarded request: the authority that the client used

_TOKEN_SCHEMES: Final = ("bearer", "api-key")


def bearer_of(authorization: str | None) -> str | None:
    """The token of an ``Authorization`` header: ``Bearer TOKEN``, or ``Api-Key TOKEN`` as truss sends it.

    None for any other header.
    """
    scheme, _, token = (authorization or "").partition(" ")
    return (token.strip() or None) if scheme.lower() in _TOKEN_SCHEMES else None


def authorization(bearer: str | None) -> dict[str, str]:
    """The header that carries the token; empty without a token."""
    return {"Authorization": f"Bearer {bearer}"} if bearer else {}


def chunk_path(digest: Digest) -> str:
    return f"/chunks/{digest}"


def push_path(push: str, digest: Digest) -> str:
    """The data plane's path for a PUT of a chunk; the answer also reports whether the chunk has to be sent."""
    return f"/pushes/{push}/chunks/{digest}"


def parse_push_path(path: str) -> tuple[str, Digest] | None:
    """None if the path is not one of ``push_path``."""
    match = _PUSH_PATH.fullmatch(path.partition("?")[0])
    return (match[1], Digest(match[2])) if match else None


def parse_chunk_path(path: str) -> Digest | None:
    """None if the path is not one of ``chunk_path``."""
    match = _CHUNK_PATH.fullmatch(path.partition("?")[0])
    return Digest(match[1]) if match else None


class HeadRefusedError(ValueError):
    """A malformed, ambiguous or too long head; a server answers ``status``."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def parse_headers(content: bytes, start: int, limit: int, whose: str) -> dict[str, str]:
    """The headers by lower-case name, from ``start`` to the empty line that ends ``content``.

    Values of one name are joined by commas (RFC 9110, section 5.3): a duplicate makes headers such as ``Range`` or
    ``Content-Length`` malformed, instead of silently winning or losing.

    Raises ``HeadRefusedError``: a line is malformed, or there are more than ``limit``.
    """
    stop = len(content) - 2
    if _HEADER_LINES.fullmatch(content, start, stop) is None:
        raise HeadRefusedError(400, f"{whose} has a malformed header")
    lines = content[start:stop].decode("latin-1").split("\r\n")[:-1]
    if len(lines) > limit:
        raise HeadRefusedError(431, f"{whose} has more than {limit} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host: ``localhost``, or a loopback address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_in_the_clear(address: str) -> bool:
    """Whether a request to this URL leaves this machine without TLS. True for malformed URLs."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return True
    return parts.scheme != "https" and not is_loopback(parts.hostname or "")


def check_local(host: str | None, origin: str | None) -> None:
    """Raise ``ForeignRequestError`` for a browser's request on behalf of another site.

    A page whose name was just rebound to 127.0.0.1 (DNS rebinding) is detected by the name in ``Host``, any other page
    by its ``Origin``. A page from another port of this machine is foreign too: it may be a notebook that displays
    foreign content. Every browser sends ``Host``, which HTTP/1.0 clients may omit, and few programs send ``Origin``.
    """
    if host is not None:
        named = _AUTHORITY.fullmatch(host)
        name = named[1].strip("[]") if named else ""
        # No name below .localhost can be rebound: RFC 6761, section 6.3.
        if not is_loopback(name) and not name.lower().removesuffix(".").endswith(".localhost"):
            raise ForeignRequestError("Host", host[:200])
    if origin is not None and origin.lower() not in (f"{scheme}://{host}".lower() for scheme in ("http", "https")):
        raise ForeignRequestError("Origin", origin[:200])


def keeps_alive(headers: dict[str, str], *, is_http_1_0: bool) -> bool:
    """Whether the connection stays open after this message (RFC 9112, section 9.3)."""
    options = {option.strip() for option in headers.get("connection", "").lower().split(",")}
    return "close" not in options and (not is_http_1_0 or "keep-alive" in options)


class UnsatisfiableRangeError(ValueError):
    """The range contains no existing byte: status 416."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The requested part of ``size`` bytes; None for the whole.

    Malformed headers, other units and several ranges are ignored, as the RFC allows.

    Raises ``UnsatisfiableRangeError``: it begins past the end, or is a suffix of zero bytes.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= stop:
        raise UnsatisfiableRangeError(header)
    return ByteRange(start, stop)


def format_range(byte_range: ByteRange) -> str:
    """HTTP's end is inclusive, ours is not (RFC 9110, section 14)."""
    return f"bytes={byte_range.start}-{byte_range.stop - 1}"


def format_content_range(byte_range: ByteRange, size: int) -> str:
    return f"bytes {byte_range.start}-{byte_range.stop - 1}/{size}"


def parse_content_range(header: str | None) -> tuple[ByteRange, int] | None:
    """The bytes in an answer and the total size; None for any other form, an unknown total included."""
    match = _CONTENT_RANGE.fullmatch(header or "")
    if match is None or not int(match[1]) <= int(match[2]) < int(match[3]):
        return None
    return ByteRange(int(match[1]), int(match[2]) + 1), int(match[3])


def parse_retry_after(headers: Headers) -> float | None:
    """Seconds from ``Retry-After`` (RFC 9110, section 10.2.3: a number or a date), else from the hub's ``ratelimit``.

    Source: the hub's form is ``"api";r=0;t=55``, with ``t`` the seconds until the window opens again.
    """
    value = headers.get("retry-after")
    if value is None:
        match = re.search(r"\br\s*=\s*0\b[^,]*\bt\s*=\s*(\d{1,9})\b", headers.get("ratelimit") or "")
        return float(match[1]) if match else None
    if re.fullmatch(r"[ \t]*[0-9]{1,9}[ \t]*", value):
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None  # neither a number nor a date, or a day that no month has
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time())
