"""Small changes that make rate limits wrong: file, breakage, old text, new text."""

from __future__ import annotations

from typing import Final

LIMITS: Final = [
    ("token_bucket.py", "no upper bound", "min(float(self.burst), self._tokens + (now - self._at) * self.rate)",
     "self._tokens + (now - self._at) * self.rate"),
    ("token_bucket.py", "time that is late counts twice", "if now > self._at:", "if True:"),
    ("token_bucket.py", "reserved for nothing", "self._tokens -= size\n        return max", "return max"),
    ("token_bucket.py", "taken for nothing", "self._tokens -= size\n        return True", "return True"),
    ("token_bucket.py", "taken before they are here", "if self._tokens < size:", "if self._tokens <= 0:"),
    ("rate_limit.py", "no share for lower classes", "self._owed[lower] += SHARE * turn.size", "pass"),
    ("rate_limit.py", "a share is had again and again", "self._owed[turn.traffic] -= turn.size", "pass"),
    ("rate_limit.py", "a share that is too large", "self._owed[lower] += SHARE * turn.size", "self._owed[lower] += 3 * SHARE * turn.size"),
    ("rate_limit.py", "the lowest class goes first", "waiting[0] if waiting else None", "waiting[-1] if waiting else None"),
    ("rate_limit.py", "who came last goes first", "[queue[0] for queue", "[queue[-1] for queue"),
    ("rate_limit.py", "shares are saved up without waiting", "self._owed[traffic] = 0.0", "pass"),
    ("rate_limit.py", "who withdraws stays", "self._waiting[turn.traffic].remove(turn)\n            self._settle", "self._settle"),
]  # fmt: skip
