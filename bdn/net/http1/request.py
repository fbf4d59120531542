"""Addresses and requests as they go over the wire. Whatever cannot be sent safely is refused before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

Origin = tuple[str, str, int]

_ADDRESS: Final = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_TARGET: Final = re.compile(r"[!-~]+")
_HEADER_LINES: Final = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++: [\t -~\x80-\xff]*+\r\n)*+")


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
