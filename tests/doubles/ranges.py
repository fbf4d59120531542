"""Reads a range of a Location as plainly as possible, with none of the code under test."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from urllib.parse import urlsplit

from bdn.core.ports import Location


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    status: int
    headers: dict[str, str]
    content: bytes


def read_range(location: Location, start: int, stop: int) -> RangeAnswer:
    parts = urlsplit(location.url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    with closing(HTTPConnection(parts.hostname or "", parts.port)) as connection:
        connection.request("GET", target, headers={**dict(location.headers), "Range": f"bytes={start}-{stop - 1}"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return RangeAnswer(response.status, headers, response.read())
