"""Addresses, requests and redirects. Whatever cannot be sent safely is refused before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from bdn.core.ports import Headers

Origin = tuple[str, str, int]

_ADDRESS: Final = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_LINES: Final = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [\t -~\x80-\xff]*+\r\n)*+")


REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
REDIRECT_LIMIT: Final = 5
REDIRECT_BODY_LIMIT: Final = 64 * 1024  # read to keep the connection; a longer one is not worth it

# Headers that another origin may see. Any other may be a credential, by whatever name a source signs its requests.
_HARMLESS: Final = frozenset({"accept", "accept-encoding", "if-match", "range", "user-agent", "x-amz-checksum-mode"})


class UnsendableError(ValueError):
    """An address or a header that no request can hold. The message repeats neither: they may be signed, or secret."""


def origin_of(url: SplitResult) -> Origin:
    """Scheme, host and port: what a connection and a credential belong to."""
    return url.scheme, url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def split_address(url: str) -> tuple[Origin, str]:
    """Where to connect, and what to ask for there: path and query exactly as they stand.

    Raises:
        UnsendableError: it is no address that can be asked over http or https.
    """
    found = _ADDRESS.match(url)
    if found is None:
        raise UnsendableError("an address is neither http nor https")
    scheme, place, target = found.groups()
    if not target.startswith("/"):
        target = f"/{target}"
    if _TARGET.fullmatch(target) is None:
        raise UnsendableError("an address holds characters that cannot be sent")
    return _origin_at(scheme, place), target


@lru_cache(maxsize=256)
def _origin_at(scheme: str, place: str) -> Origin:
    """Cached, because thousands of files lie at one place."""
    if _TARGET.fullmatch(place) is None:
        raise UnsendableError("an address has no host that can be asked for")
    try:
        origin = origin_of(urlsplit(f"{scheme}://{place}"))
    except ValueError:
        raise UnsendableError("an address has no valid host and port") from None
    if not origin[1]:
        raise UnsendableError("an address has no host that can be asked for")
    return origin


def host_of(origin: Origin) -> str:
    """Host and port as requests name them: the port where it is not the scheme's own, IPv6 addresses in brackets."""
    scheme, host, port = origin
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if scheme == "https" else 80) else f"{name}:{port}"


def format_get(origin: Origin, target: str, headers: Mapping[str, str]) -> bytes:
    """A GET that accepts no encoding, unless the headers say otherwise.

    Raises:
        UnsendableError: a header would break out of its line, or has no bytes.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if _HEADER_LINES.fullmatch(lines) is None or lines.count("\n") != len(headers):
        raise UnsendableError("a header cannot be sent")
    given = f"\r\n{lines.lower()}"
    host = "" if "\r\nhost: " in given else f"Host: {host_of(origin)}\r\n"
    accept = "" if "\r\naccept-encoding: " in given else "Accept-Encoding: identity\r\n"
    return f"GET {target} HTTP/1.1\r\n{host}{accept}{lines}\r\n".encode("latin-1")


class DowngradeError(Exception):
    """A redirect leads from https to http.

    Refused with and without credentials: what comes in the clear may be anybody's, and only some upstreams offer a checksum.
    """


def follow(url: str, headers: dict[str, str], answer: Headers) -> tuple[str, dict[str, str]]:
    """The next address and the headers for it: to another origin, only those that are plainly harmless.

    Raises:
        DowngradeError: it leads out of https.
        UnsendableError: it leads nowhere.
    """
    target = urljoin(url, answer.get("Location") or "")
    here, (there, _) = split_address(url)[0], split_address(target)
    if here[0] == "https" and there[0] == "http":
        raise DowngradeError
    if there != here:
        headers = {name: value for name, value in headers.items() if name.lower() in _HARMLESS}
    return target, headers
