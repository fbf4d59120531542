from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bdn.sources.rate_limit import retry_after_seconds

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "0"}, 0),
        ({"retry-after": " 120 "}, 120),
        ({"Retry-After": "Fri, 20 Nov 2026 12:00:30 GMT"}, 30),
        ({"Retry-After": "Fri, 20 Nov 2026 12:00:30 -0000"}, 30),
        ({"Retry-After": "Fri, 20 Nov 2026 11:00:00 GMT"}, 0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-5"}, None),
        ({"Retry-After": "١٢"}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api" ; r = 0 ; t = 55'}, 55),
        ({"RateLimit": '"pages";r=3;t=99, "api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=1;t=55'}, None),
        ({"RateLimit": '"api";r=0;t=5', "Retry-After": "9"}, 9),
        ({"RateLimit": "nonsense"}, None),
    ],
)
def test_the_longest_wait_that_the_headers_ask_for_counts(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, now=NOW) == seconds
