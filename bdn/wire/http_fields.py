"""Paths, headers, byte ranges and retry times as they stand in HTTP."""

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

SUSPECT_HEADER: Final = "BDN-Suspect"  # of a chunk request: it came with wrong content, so check before you send
_ONE_RANGE = re.compile(r"bytes=\s*([0-9]{0,30})-([0-9]{0,30})\s*", re.IGNORECASE)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,30})-([0-9]{1,30})/([0-9]{1,30})")
TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_HEADER_LINES: Final = re.compile(rb"(?:%s:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)*+" % TOKEN)
_AUTHORITY: Final = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(?::[0-9]*)?")
_NAME: Final = r"b3(?::|%3[Aa])([0-9a-f]{64})"
_CHUNK_PATH: Final = re.compile(f"/chunks/{_NAME}")
_PUSH_PATH: Final = re.compile(f"/pushes/(mir_[0-9a-f]{{24}})/chunks/{_NAME}")

LONGEST_WAIT_SECONDS: Final = 60.0  # that one request may ask to be held for
LONGEST_SOURCE: Final = 4096  # characters of a source to look for: SQLite takes no pattern above 50,000 bytes
MEDIA_CHUNK: Final = "application/octet-stream"
MEDIA_JSON: Final = "application/json"
MANIFEST_HEADER: Final = "BDN-Manifest"  # of a chunk request: fetch it if you do not hold it, because you own it
AGENT_HEADER: Final = "BDN-Agent-Token"  # of an agent that commits with the grant of a job
DATA_PORT_HEADER: Final = (
    "BDN-Data-Port"  # of a manifest: where the mirror serves chunks; absent: on the port of its API
)
DELIVERY_HEADER: Final = (
    "BDN-Delivery"  # of a manifest: ``direct`` where agents read the bucket by themselves; absent: ``proxy``
)
ORGANISATION_HEADER: Final = "BDN-Organisation"  # of an operator's call: for whom, if not for the token's own

_TOKEN_SCHEMES: Final = ("bearer", "api-key")


def bearer_of(authorization: str | None) -> str | None:
    """The token of an ``Authorization`` header: ``Bearer TOKEN``, or ``Api-Key TOKEN`` as truss says it. None for any other."""
    scheme, _, token = (authorization or "").partition(" ")
    return (token.strip() or None) if scheme.lower() in _TOKEN_SCHEMES else None


def chunk_path(digest: Digest) -> str:
    """Where the data plane serves a chunk."""
    return f"/chunks/{digest}"


def push_path(push: str, digest: Digest) -> str:
    """Where the data plane takes a chunk of a push, and says whether it has to be sent."""
    return f"/pushes/{push}/chunks/{digest}"


def parse_push_path(path: str) -> tuple[str, Digest] | None:
    """The push and the chunk that a request path names; None for other paths."""
    match = _PUSH_PATH.fullmatch(path.partition("?")[0])
    return (match[1], Digest(match[2])) if match else None


def parse_chunk_path(path: str) -> Digest | None:
    """The chunk that a request path names, or None when it names no chunk."""
    match = _CHUNK_PATH.fullmatch(path.partition("?")[0])
    return Digest(match[1]) if match else None


class HeadRefusedError(ValueError):
    """A head that is malformed, ambiguous or too long; ``status`` is what a server answers to it."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


def parse_headers(content: bytes, start: int, limit: int, whose: str) -> dict[str, str]:
    """The headers of a head by name in lower case, from ``start`` to the empty line that ends ``content``.

    Values of one name are joined by commas (RFC 9110, section 5.3): a second one makes such a header as ``Range`` or
    ``Content-Length`` malformed, and never wins or loses silently.

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
    """Whether only this machine can reach the host: ``localhost``, or an address of the loopback."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_in_the_clear(address: str) -> bool:
    """Whether what is sent to this URL leaves this machine without TLS. Of what is no URL, nobody knows: it is said to."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return True
    return parts.scheme != "https" and not is_loopback(parts.hostname or "")


def check_local(host: str | None, origin: str | None) -> None:
    """Raise ``ForeignRequestError`` for what a browser sends on behalf of a page that is not this service's own.

    A page whose name leads to 127.0.0.1 since a moment ago (DNS rebinding) is known by its name in ``Host``, any other by its
    ``Origin``. A page of another port of this machine is foreign as well: it may be a notebook that shows what somebody sent.
    No browser leaves ``Host`` away, as HTTP/1.0 allows, and few programs send ``Origin``.
    """
    if host is not None:
        named = _AUTHORITY.fullmatch(host)
        if named is None or not is_loopback(named[1].strip("[]")):
            raise ForeignRequestError("Host", host[:200])
    if origin is not None and origin.lower() not in (f"{scheme}://{host}".lower() for scheme in ("http", "https")):
        raise ForeignRequestError("Origin", origin[:200])


def keeps_alive(headers: dict[str, str], *, is_http_1_0: bool) -> bool:
    """Whether the connection may go on after this message (RFC 9112, section 9.3)."""
    options = {option.strip() for option in headers.get("connection", "").lower().split(",")}
    return "close" not in options and (not is_http_1_0 or "keep-alive" in options)


class UnsatisfiableRangeError(ValueError):
    """The range asks for nothing that exists: status 416."""


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """The part of ``size`` bytes that a ``Range`` header asks for; None for the whole.

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
    """The ``Range`` header that asks for these bytes. HTTP's end is inclusive, ours is not (RFC 9110, section 14)."""
    return f"bytes={byte_range.start}-{byte_range.stop - 1}"


def format_content_range(byte_range: ByteRange, size: int) -> str:
    """The ``Content-Range`` header of an answer with these bytes."""
    return f"bytes {byte_range.start}-{byte_range.stop - 1}/{size}"


def parse_content_range(header: str | None) -> tuple[ByteRange, int] | None:
    """The bytes that an answer says it holds and the total size; None for any other form, an unknown total included."""
    match = _CONTENT_RANGE.fullmatch(header or "")
    if match is None or not int(match[1]) <= int(match[2]) < int(match[3]):
        return None
    return ByteRange(int(match[1]), int(match[2]) + 1), int(match[3])


def parse_retry_after(headers: Headers) -> float | None:
    """Seconds, from ``Retry-After`` (RFC 9110, section 10.2.3: a number or a date), else from the hub's ``ratelimit``.

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
        return None  # neither a number nor a date, or a day of a month that no calendar has
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time())
