"""Small changes that make rate limits wrong: file, breakage, old text, new text."""

from __future__ import annotations

from typing import Final

LIMITS: Final = [
    ("pace/token_bucket.py", "no upper bound", "min(float(self.burst), self._tokens + (now - self._at) * self.rate)",
     "self._tokens + (now - self._at) * self.rate"),
    ("pace/token_bucket.py", "time that is late counts twice", "if now > self._at:", "if True:"),
    ("pace/token_bucket.py", "reserved for nothing", "self._tokens -= size\n        return max", "return max"),
    ("pace/token_bucket.py", "taken for nothing", "self._tokens -= size\n        return True", "return True"),
    ("pace/token_bucket.py", "taken before they are here", "if self._tokens < size:", "if self._tokens <= 0:"),
    ("pace/rate_limit.py", "no share for lower classes", "self._owed[lower] += SHARE * turn.size", "pass"),
    ("pace/rate_limit.py", "a share is had again and again", "self._owed[turn.traffic] -= turn.size", "pass"),
    ("pace/rate_limit.py", "a share that is too large", "self._owed[lower] += SHARE * turn.size", "self._owed[lower] += 3 * SHARE * turn.size"),
    ("pace/rate_limit.py", "the lowest class goes first", "waiting[0] if waiting else None", "waiting[-1] if waiting else None"),
    ("pace/rate_limit.py", "who came last goes first", "[queue[0] for queue", "[queue[-1] for queue"),
    ("pace/rate_limit.py", "shares are saved up without waiting", "self._owed[traffic] = 0.0", "pass"),
    ("pace/rate_limit.py", "who withdraws stays", "self._waiting[turn.traffic].remove(turn)\n            self._settle", "self._settle"),
]  # fmt: skip
