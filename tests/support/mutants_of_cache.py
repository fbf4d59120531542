"""Breakages of the cache's rules: (file, what is wrong, what stands there, what the mutant says instead)."""

from __future__ import annotations

Mutant = tuple[str, str, str, str]

_INDEX: list[tuple[str, str, str]] = [
    ("a manifest as large as the budget is refused", "if total > budget and", "if total >= budget and"),
    ("a whole manifest is refused when the budget shrank", " and not self._is_held_whole(contents)", ""),
    ("room is made for content that is here already", "Shortfall(self.ledger, absent,", "Shortfall(self.ledger, contents if absent else absent,"),
    ("content shared with the newcomer is counted as freed", "content not in spare)", "True)"),
    (
        "a victim is forgotten before the newcomer is remembered",
        ("        self._remember(manifest, contents, now)  # first, so that forgetting a victim spares what the two share\n"
        "        for victim in victims:\n            self._forget(victim.manifest)\n"),
        ("        for victim in victims:\n            self._forget(victim.manifest)\n"
        "        self._remember(manifest, contents, now)\n"),
    ),
    ("content of a victim that stays counts as freed", "lacking.free(victim.size,", "lacking.free(sum(self._contents[manifest].values()),"),
    ("a manifest that does not fit is let in", "        if not lacking.is_met:\n", "        if False:\n"),
    ("leased manifests are evicted", " or self.leases.is_leased(manifest)", ""),
    ("the newcomer itself is evicted", "manifest == keep or ", ""),
    (
        "the newest manifest goes first",
        "() if lacking.is_met else self.recency.oldest_first():",
        "() if lacking.is_met else reversed(tuple(self.recency.oldest_first())):",
    ),
    ("content of two victims never leaves", "self._named_by[content] <= gone", "self._named_by[content] == {manifest}"),
    ("a victim takes shared content with it", "if self._named_by[content] <= gone", "if True"),
    ("lost content leaves with its manifest once more", "            and self.ledger.size_of(content) is not None\n", ""),
    ("forgetting releases shared content", "            if not names:\n", "            if True:\n"),
    ("forgetting keeps the space", "                self.ledger.release(content)\n", ""),
    ("forgetting keeps the leases", "self.leases.end(holder.stage_id)", "pass"),
    ("forgetting keeps the place in the order", "        self.recency.forget(manifest)\n", ""),
    ("forgetting keeps the names", "            names.discard(manifest)\n", "            names = names - {manifest}\n"),
    ("fills of others are not waited for", "for digest in contents if not self.ledger.is_committed(digest)", "for digest in absent"),
    ("what is missing is not reserved", "            self._reserve(digest, size)\n        self.leases", "            pass\n        self.leases"),
    ("an admission takes no lease", "        self.leases.take(manifest, holder)\n", ""),
    ("an admission is no use", "        self.recency.touch(manifest, now)\n", "        self.recency.touch(manifest, 0.0)\n"),
    ("a begun fill counts as whole after a restart", "if present[digest]:", "if True:"),
    ("a restart counts what is not on disk", "if digest in present and self", "if self"),
    ("a whole file counts as a fill after a restart", "                    self.commit(digest)\n", "                    pass\n"),
    ("a restart forgets last uses", "contents, last_used)", "contents, 0.0)"),
    (
        "a manifest whose fills go on counts as whole",
        "all(self.ledger.is_committed(content)",
        "all(self.ledger.size_of(content) is not None",
    ),
    ("a manifest that is not held is complete", "return contents is not None and", "return contents is None or"),
    ("force is ignored", "if holders and not force:", "if holders:"),
    ("everything is forced", "if holders and not force:", "if holders and False:"),
    ("refusals are not reported", "                refused.append(Leased(manifest, holders))\n", ""),
    ("a manifest asked for twice goes twice", "in dict.fromkeys(manifests):", "in manifests:"),
    ("unknown manifests are planned", "            if manifest not in self._contents:\n                continue\n", ""),
    ("a plan does not say whose leases break", "self._victim(manifest, gone, holders))", "self._victim(manifest, gone, ()))"),
    (
        "a refused manifest counts as gone",
        "            if holders and not force:\n",
        "            gone.add(manifest)\n            if holders and not force:\n",
    ),
    ("LRU frees more than asked", "if plan.size >= size:", "if plan.size > size:"),
    ("LRU frees one manifest only", "            chosen.append(manifest)\n", "            chosen = [manifest]\n"),
    ("LRU ignores force", "plan = self.plan(chosen, force=force)", "plan = self.plan(chosen)"),
    ("planning carries out", "        return EvictionPlan(tuple(victims), tuple(refused))", "        self.evict(EvictionPlan(tuple(victims), ()))\n        return EvictionPlan(tuple(victims), tuple(refused))"),
    ("an eviction stops after one", "        for victim in plan.victims:\n", "        for victim in plan.victims[:1]:\n"),
    ("lost content stays counted", "        size = self.ledger.release(content)\n        for", "        size = self.ledger.size_of(content) or 0\n        for"),
    ("leased bytes count shared content twice", "if len(leased) > 1:", "if False:"),
    ("a manifest is complete with one content less", "is not None and self._totals[manifest].whole == len(contents)", "is not None and self._totals[manifest].whole >= len(contents) - 1"),
    ("a commit makes no manifest whole", "            self._totals[manifest].whole += 1\n", "            pass\n"),
    ("a second commit counts again", "        if self.ledger.is_committed(content):\n            return\n", ""),
    ("lost content still makes a manifest whole", "            self._totals[manifest].whole -= whole\n", ""),
    ("lost content stays in a manifest's sum", "            self._totals[manifest].counted -= size\n", ""),
    ("reserved content is in no manifest's sum", "            self._totals[manifest].counted += size\n", "            pass\n"),
    ("what was here before is in no manifest's sum", "            totals.counted += self.ledger.size_of(content) or 0\n", ""),
]  # fmt: skip
_LEDGER: list[tuple[str, str, str]] = [
    ("content can be reserved twice", "if self.size_of(digest) is not None:", "if False:"),
    ("whole content can be reserved again", "if self.size_of(digest) is not None:", "if digest in self._reserved:"),
    ("a commit keeps the reservation", "        self.reserved_bytes -= size\n        self.committed_bytes += size\n", "        self.committed_bytes += size\n"),
    ("a commit counts nothing", "        self.reserved_bytes -= size\n        self.committed_bytes += size\n", "        self.reserved_bytes -= size\n"),
    ("committing twice fails", "        if digest in self._committed:\n            return\n", ""),
    ("a released fill stays reserved", "            size = self._reserved.pop(digest, 0)\n            self.reserved_bytes -= size\n", "            size = self._reserved.pop(digest, 0)\n"),
    ("released content stays committed", "            self.committed_bytes -= size\n        else", "            pass\n        else"),
    ("only whole content is used space", "return self.reserved_bytes + self.committed_bytes", "return self.committed_bytes"),
    ("a fill has no size", "self._committed.get(digest, self._reserved.get(digest))", "self._committed.get(digest)"),
]  # fmt: skip
_SHORTFALL: list[tuple[str, str, str]] = [
    ("one victim too many goes", "return self._over <= 0 and", "return self._over < 0 and"),
    ("one victim too few goes", "return self._over <= 0 and", "return self._over <= 1 and"),
    ("content on its way is not counted as used", "self._over = ledger.used_bytes +", "self._over = ledger.committed_bytes +"),
    ("what needs no room is refused room", " if self.needed else 0", ""),
    ("free space is negative", "max(0, budget - ledger.used_bytes)", "budget - ledger.used_bytes"),
    ("inodes are not looked at", " and self._files_over <= 0", ""),
    ("inodes that victims free do not count", "        self._files_over -= files\n", ""),
    ("a lack of inodes is told as one of bytes", "if self._over <= 0 else (None, None)", "if False else (None, None)"),
]  # fmt: skip
_LEASES: list[tuple[str, str, str]] = [
    ("a stage gives back one manifest only", "        for manifest in held:\n", "        for manifest in held[:1]:\n"),
    ("an unleased manifest stays leased", "                del self._by_manifest[manifest]\n", "                pass\n"),
    ("ending a stage ends everybody's lease", "            del self._by_manifest[manifest][stage_id]\n            if not self._by_manifest[manifest]:\n", "            if True:\n"),
    ("expiry is exclusive", "holder.expires_at <= now", "holder.expires_at < now"),
    ("a lease without end expires", "if holder.expires_at is not None and holder.expires_at <= now", "if (holder.expires_at or 0) <= now"),
    ("renewing keeps the old expiry", ".setdefault(manifest, {})[holder.stage_id] = holder", ".setdefault(manifest, {}).setdefault(holder.stage_id, holder)"),
    ("renewing moves to the end", "        self._by_manifest.setdefault(manifest, {})[holder.stage_id] = holder", "        self._by_manifest.setdefault(manifest, {}).pop(holder.stage_id, None)\n        self._by_manifest[manifest][holder.stage_id] = holder"),
    ("a stage expires once per manifest", "        return tuple(over.values())", "        return tuple(h for held in self._by_manifest.values() for h in held.values() if h.stage_id in over)"),
]  # fmt: skip
_RECENCY: list[tuple[str, str, str]] = [
    ("a clock that went back makes a manifest older", "max(now, self._last_used.pop(manifest, now))", "now"),
    ("a touch at an equal time is no touch", "self._last_used.pop(manifest, now))", "self._last_used.get(manifest, now))"),
    ("the newest comes first", "key=self._last_used.__getitem__)", "key=self._last_used.__getitem__, reverse=True)"),
    ("the order is that of the first touch", "iter(sorted(self._last_used, key=self._last_used.__getitem__))", "iter(tuple(self._last_used))"),
]  # fmt: skip

CACHE: list[Mutant] = [
    (file, *mutant)
    for file, mutants in (
        ("cache/index.py", _INDEX),
        ("cache/ledger.py", _LEDGER),
        ("cache/shortfall.py", _SHORTFALL),
        ("cache/leases.py", _LEASES),
        ("cache/recency.py", _RECENCY),
    )
    for mutant in mutants
]
