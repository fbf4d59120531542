"""Small changes that make the pace of requests wrong: file, breakage, old text, new text."""

from __future__ import annotations

from typing import Final

PACE: Final = [
    (
        "pace/limit.py",
        "never cut",
        "self._set(now, min(self.limit - 1, int(self.limit * _CUT)))",
        "self._set(now, self.limit)",
    ),
    (
        "pace/limit.py",
        "no lower bound",
        "self.limit = max(self._rule.least, min(limit, self._rule.most))",
        "self.limit = min(limit, self._rule.most)",
    ),
    (
        "pace/limit.py",
        "no upper bound",
        "self.limit = max(self._rule.least, min(limit, self._rule.most))",
        "self.limit = max(self._rule.least, limit)",
    ),
    ("pace/limit.py", "every increase is kept", "(worth >= self._rule.worthwhile) == was_up", "was_up"),
    ("pace/limit.py", "in flight under the old limit counts", "self._settling = self.active\n", "self._settling = 0\n"),
    ("pace/limit.py", "a slower host is not noticed", "speed < _SLOWER", "speed < 0"),
    ("pace/limit.py", "failures are no congestion", "window.failed >= _FAILING * window.ended", "False"),
    ("pace/limit.py", "unused limits grow", "measure is None or not is_used_up", "measure is None"),
    (
        "pace/limit.py",
        "a shorter pause shortens",
        "self.closed_until = max(self.closed_until, now + min(retry_after_seconds, _LONGEST_PAUSE_SECONDS))",
        "self.closed_until = now + min(retry_after_seconds, _LONGEST_PAUSE_SECONDS)",
    ),
    ("pace/limit.py", "pauses of years", "min(retry_after_seconds, _LONGEST_PAUSE_SECONDS)", "retry_after_seconds"),
    (
        "pace/limit.py",
        "no rest before the ceiling",
        "elif self.limit <= _NEAR_CEILING * ceiling < following:",
        "elif False:",
    ),
    (
        "pace/limit.py",
        "never doubles",
        "(self.limit if self._is_steep else max(1, self.limit // 4))",
        "max(1, self.limit // 4)",
    ),
    ("pace/limit.py", "never goes down by itself", "self._next_is_up = not was_up", "self._next_is_up = True"),
    ("pace/window.py", "sizes are mixed up", "is_large = size >= SMALL_FILE_SIZE", "is_large = True"),
    ("pace/window.py", "idle time counts", "self._idle += passed", "pass"),
    (
        "pace/retry.py",
        "Retry-After of 503 is ignored",
        "isinstance(error, UpstreamRateLimitedError | UpstreamUnavailableError)",
        "isinstance(error, UpstreamRateLimitedError)",
    ),
    ("pace/retry.py", "a file is forgiven everything", "self.left -= 1", "pass"),
]
