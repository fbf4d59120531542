"""Small changes that make the rules of the cluster ring wrong: file, breakage, old text, new text."""

from __future__ import annotations

from typing import Final

RING: Final = [
    ("placement.py", "no bound of the load", "if loads[owner] >= self.share:", "if False:"),
    ("placement.py", "a bound that is too wide", "ceil(load_bound * len(self._chunks)", "ceil(2 * load_bound * len(self._chunks)"),
    ("placement.py", "the order of members plays a part", "tuple(sorted(set(members)))", "tuple(dict.fromkeys(members))"),
    ("placement.py", "the next owner is the last", "best = nlargest(count, range(len(scores)), key=scores.__getitem__)",
     "best = sorted(range(len(scores)), key=scores.__getitem__)[:count]"),
    ("placement.py", "an owner comes twice", "for rank in best if rank != owner)", "for rank in best)"),
    ("routes.py", "we ask ourselves", "if owner == me or len(peers)", "if len(peers)"),
    ("routes.py", "all peers are asked", " or len(peers) == _PEERS_ASKED", ""),
    ("routes.py", "who is avoided is asked", "if not is_avoided(owner):", "if True:"),
    ("lanes.py", "all begin with the same owner", "start = xxh3_64_intdigest(me.encode()) % len(members) if rank is None else rank",
     "start = 0"),
    ("lanes.py", "owner by owner instead of in rounds", "chain.from_iterable(rounds)", "sorted(chain.from_iterable(rounds), key=lambda index: placement.owner(index) or '')"),
    ("lanes.py", "our own are asked of peers as well", "for owner in circle if owner != rank)", "for owner in circle)"),
    ("lanes.py", "each reads at once what one alone would", "max(1, ceil(most / max(1, members)))", "most"),
    ("hedging.py", "judged by nothing", "_NEEDED: Final = 8", "_NEEDED: Final = 1"),
    ("hedging.py", "the first ones count as the tail", "_SLACK_OF_FEW if len(self._paces) < _MANY else _SLACK", "_SLACK"),
    ("hedging.py", "no slack", "_SLACK_OF_FEW if len(self._paces) < _MANY else _SLACK", "1.0"),
    ("hedging.py", "what was left counts for nothing", "self._paces.append(self._percentile(_TAIL))", "pass"),
    ("hedging.py", "nothing is forgotten", "deque(maxlen=_REMEMBERED)", "deque()"),
    ("hedging.py", "the median is the tail", "ceil(share * len(self._paces)) - 1", "len(self._paces) // 2"),
    ("hedging.py", "a budget without a bottom", "self.used += size\n        return True", "return True"),
    ("hedging.py", "the budget may be overdrawn once", "self.used + size > self.limit", "self.used > self.limit"),
    ("peer_standing.py", "one that is slow is tried again at once", "SLOW = (60.0, 600.0)", "SLOW = (0.5, 60.0)"),
    ("peer_standing.py", "a lie is as good as a failure", "WRONG = (30.0, 600.0)", "WRONG = (2.5, 60.0)"),
    ("peer_standing.py", "avoided for ever", "min(record.seconds * _GROWTH, fault.longest_seconds)", "record.seconds * _GROWTH"),
    ("peer_standing.py", "never longer", "min(record.seconds * _GROWTH, fault.longest_seconds)", "fault.first_seconds"),
    ("peer_standing.py", "each of several counts", "is_new = now >= record.until", "is_new = True"),
    ("peer_standing.py", "all are on trial at once", "record.trial_until = now + _TRIAL_SECONDS", "pass"),
    ("peer_standing.py", "old requests are trials", "if record is None or now < record.until:", "if record is None:"),
    ("peer_standing.py", "one success and all is forgotten", "if record.seconds < _FORGOTTEN_SECONDS:", "if True:"),
    ("peer_standing.py", "who left is remembered", "for peer, record in self._records.items() if peer in peers}",
     "for peer, record in self._records.items()}"),
    ("peer_standing.py", "who is on trial is at fault", "return record is not None and now < record.until\n",
     "return record is not None\n"),
]  # fmt: skip
