"""What a double was asked and what it sent, so that tests can count requests and bytes."""

import re
from dataclasses import dataclass, field
from threading import Condition

NOTED_HEADERS = (
    "authorization",
    "range",
    "if-match",
    "accept-encoding",
    "user-agent",
    "x-hf-download-counter",
    "bdn-manifest",
    "bdn-suspect",
    "x-amz-checksum-mode",
    "x-amz-request-payer",
)


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
        self._changed = Condition()

    def add(self, request: LoggedRequest) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._requests.clear()

    def find(self, target: str = "", *, method: str | None = None, origin: str | None = None) -> list[LoggedRequest]:
        """The requests whose target contains the regular expression."""
        pattern = re.compile(target)
        with self._changed:
            return [
                request
                for request in self._requests
                if pattern.search(request.target)
                and method in (None, request.method)
                and origin in (None, request.origin)
            ]

    def wait_for(self, target: str, timeout_seconds: float = 120) -> None:
        """Return once such a request has arrived; blocking."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.count(target), timeout_seconds):
                msg = f"no request for {target!r} in {timeout_seconds} s"
                raise TimeoutError(msg)

    def wait_for_more(self, count: int, timeout_seconds: float) -> None:
        """Return once so many requests more have arrived; blocking."""
        with self._changed:
            wanted = len(self._requests) + count
            if not self._changed.wait_for(lambda: len(self._requests) >= wanted, timeout_seconds):
                msg = f"not {count} requests more in {timeout_seconds} s"
                raise TimeoutError(msg)

    def count(self, target: str = "", *, method: str | None = None, origin: str | None = None) -> int:
        return len(self.find(target, method=method, origin=origin))

    def bytes_served(self, target: str = "", *, origin: str | None = None) -> int:
        return sum(request.bytes_served for request in self.find(target, origin=origin))
