"""How long an upstream asks us to wait."""

from __future__ import annotations

import email.utils
import re
import time
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
    value = headers.get("Retry-After")
    if value is not None:
        if value.strip().isdigit():
            return float(value)
        moment = email.utils.parsedate_to_datetime(value) if "," in value else None
        return max(0.0, moment.timestamp() - time.time()) if moment else None
    match = re.search(r"\br=0\b.*\bt=(\d+)", headers.get("ratelimit") or "")
    return float(match[1]) if match else None
