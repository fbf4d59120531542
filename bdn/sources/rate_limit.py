"""How long an upstream asks us to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_EXHAUSTED: Final = re.compile(r'"[^"]*"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)')


def retry_after_seconds(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """The longest wait that the headers of a 429 or 503 ask for, or None when they ask for none.

    ``Retry-After`` is seconds or a date (RFC 9110, 10.2.3); ``ratelimit: "api";r=0;t=55`` is the hub's way
    (draft-ietf-httpapi-ratelimit-headers-09), where only a limit with nothing remaining is a reason to wait.
    """
    found = {name.lower(): value for name, value in headers.items()}
    waits = [float(seconds) for seconds in _EXHAUSTED.findall(found.get("ratelimit", ""))]
    if (delay := _delay(found.get("retry-after", "").strip(), now or datetime.now(UTC))) is not None:
        waits.append(delay)
    return max(waits, default=None)


def _delay(value: str, now: datetime) -> float | None:
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    # "-0000" means UTC of unknown origin and parses to a date without a zone.
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())
