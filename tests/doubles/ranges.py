"""Reads a range of a Location as plainly as possible, with none of the code under test."""

from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import urljoin, urlsplit

from bdn.core.source.upstream import Location


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    status: int
    headers: dict[str, str]
    content: bytes


def read_range(location: Location, start: int, stop: int) -> RangeAnswer:
    """Follows redirects; credentials stay at the first origin."""
    return _read(location.url, {**dict(location.headers), "Range": f"bytes={start}-{stop - 1}"})


def read_whole(location: Location) -> RangeAnswer:
    """The same without a range."""
    return _read(location.url, dict(location.headers))


def _read(url: str, headers: dict[str, str]) -> RangeAnswer:
    while True:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.hostname or "", parts.port)) as connection:
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            answered = {name.lower(): value for name, value in response.getheaders()}
            content = response.read()
        if response.status not in (302, 307):
            return RangeAnswer(response.status, answered, content)
        url = urljoin(url, answered["location"])
        if urlsplit(url).netloc != parts.netloc:
            headers.pop("Authorization", None)
