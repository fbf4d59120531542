"""What a double was asked and what it sent, so that tests can count requests and bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from threading import Lock

NOTED_HEADERS = ("authorization", "range", "if-match", "accept-encoding", "user-agent", "x-hf-download-counter")


@dataclass(slots=True)
class LoggedRequest:
    """``target`` is path and query as sent; ``status`` is 0 until there is an answer; ``bytes_served`` counts bodies."""

    method: str
    target: str
    origin: str
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    bytes_served: int = 0


class RequestLog:
    """In the order of arrival; safe to read while requests run."""

    def __init__(self) -> None:
        self._requests: list[LoggedRequest] = []
        self._lock = Lock()

    def add(self, request: LoggedRequest) -> None:
        with self._lock:
            self._requests.append(request)

    def clear(self) -> None:
        with self._lock:
            self._requests.clear()

    def find(self, target: str = "", *, method: str | None = None, origin: str | None = None) -> list[LoggedRequest]:
        """The requests whose target contains the regular expression."""
        pattern = re.compile(target)
        with self._lock:
            return [
                request
                for request in self._requests
                if pattern.search(request.target)
                and method in (None, request.method)
                and origin in (None, request.origin)
            ]

    def count(self, target: str = "", *, method: str | None = None, origin: str | None = None) -> int:
        return len(self.find(target, method=method, origin=origin))

    def bytes_served(self, target: str = "", *, origin: str | None = None) -> int:
        return sum(request.bytes_served for request in self.find(target, origin=origin))
