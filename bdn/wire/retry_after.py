"""How long an upstream asks us to wait."""

from __future__ import annotations

import email.utils
import re
import time
from datetime import UTC
from typing import Protocol


class Headers(Protocol):
    """What every HTTP library's headers can do."""

    def get(self, name: str, /) -> str | None:
        """The header's value, or None."""
        ...


def parse_retry_after(headers: Headers) -> float | None:
    """Seconds, from ``Retry-After`` (RFC 9110, section 10.2.3: a number or a date), else from the hub's ``ratelimit``.

    Source: the hub's form is ``"api";r=0;t=55``, with ``t`` the seconds until the window opens again.
    """
    value = _find(headers, "Retry-After")
    if value is None:
        match = re.search(r"\br\s*=\s*0\b[^,]*\bt\s*=\s*(\d{1,9})\b", _find(headers, "RateLimit") or "")
        return float(match[1]) if match else None
    if re.fullmatch(r"[ \t]*[0-9]{1,9}[ \t]*", value):
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None  # neither a number nor a date, or a day of a month that no calendar has
    return max(0.0, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() - time.time())


def _find(headers: Headers, name: str) -> str | None:
    """In any spelling: some libraries hand out plain dictionaries with names in lower case."""
    found = headers.get(name)
    return headers.get(name.lower()) if found is None else found
