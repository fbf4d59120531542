"""Small changes that make the cluster tier's rules wrong: file, breakage, old text, new text."""

from __future__ import annotations

from typing import Final

TIERS: Final = [
    ("chunk_index.py", "a chunk that is here needs room again", "if self.ledger.size_of(chunk) is not None:\n            self._name", "if False:\n            self._name"),
    ("chunk_index.py", "a chunk as large as the budget is refused", "if size > budget:", "if size >= budget:"),
    ("chunk_index.py", "victims are still counted", "        for victim in victims:\n            self._forget(victim.manifest)\n        self.ledger", "        self.ledger"),
    ("chunk_index.py", "what nobody names any more is held", "            self.ledger.release(chunk)\n        return names\n\n    def lose", "            pass\n        return names\n\n    def lose"),
    ("chunk_index.py", "what nobody names any more is whole", "        if names:\n            self.ledger.commit(chunk)", "        if True:\n            self.ledger.commit(chunk)"),
    ("chunk_index.py", "a lost chunk is still its manifests'", "            self._chunks[manifest].discard(chunk)\n", ""),
    ("chunk_index.py", "a manifest without chunks is still known", "            if not self._chunks[manifest]:\n", "            if False:\n"),
    ("chunk_index.py", "a manifest without chunks keeps its place", "                del self._chunks[manifest]\n                self.recency.forget(manifest)\n", "                del self._chunks[manifest]\n"),
    ("chunk_index.py", "a lost chunk takes room", "                self.recency.forget(manifest)\n        self.ledger.release(chunk)\n", "                self.recency.forget(manifest)\n"),
    ("chunk_index.py", "a restart finds nothing whole", "                self.ledger.commit(chunk)\n            self._name(manifest, chunk, last_used)", "            self._name(manifest, chunk, last_used)"),
    ("chunk_index.py", "a restart forgets last uses", "self._name(manifest, chunk, last_used)", "self._name(manifest, chunk, 0.0)"),
    ("chunk_index.py", "a manifest asked for twice goes twice", "in dict.fromkeys(manifests):", "in manifests:"),
    ("chunk_index.py", "unknown manifests are planned", "if manifest in self._chunks:\n                gone", "if True:\n                gone"),
    ("chunk_index.py", "one victim too many goes by age", "            if size <= 0:", "            if size < 0:"),
    ("chunk_index.py", "one victim is all that goes by age", "            size -= victims[-1].size", "            size = 0"),
    ("chunk_index.py", "chunks in use make room", "if over <= 0 or self._is_in_use(oldest, now):", "if over <= 0:"),
    ("chunk_index.py", "a manifest goes for its own chunk", "            if oldest != manifest:", "            if True:"),
    ("chunk_index.py", "one victim too many makes room", "if over <= 0 or self", "if over < 0 or self"),
    ("chunk_index.py", "chunks on their way take no room", "over = self.ledger.used_bytes +", "over = self.ledger.committed_bytes +"),
    ("chunk_index.py", "a chunk that does not fit is let in", "        if over > 0:\n", "        if False:\n"),
    ("chunk_index.py", "free room is negative", "free = max(0, budget - self.ledger.used_bytes)", "free = budget - self.ledger.used_bytes - 1"),
    ("chunk_index.py", "in use for a moment longer", "< IN_USE_SECONDS", "<= IN_USE_SECONDS"),
    ("chunk_index.py", "a victim takes what others name", "if self._named_by[chunk] <= gone and", "if"),
    ("chunk_index.py", "what is on its way counts as freed", " and self.ledger.is_committed(chunk)\n        )", "\n        )"),
    ("chunk_index.py", "what two victims share never leaves", "self._named_by[chunk] <= gone", "self._named_by[chunk] == {manifest}"),
    ("chunk_index.py", "naming is no use", "        self.recency.touch(manifest, now)\n", ""),
    ("chunk_index.py", "forgetting frees what others name", "            if not names:\n                del", "            if True:\n                del"),
    ("chunk_index.py", "forgetting frees what is still written", "                if self.ledger.is_committed(chunk):\n", "                if True:\n"),
    ("chunk_index.py", "forgetting keeps the place in the order", "                    self.ledger.release(chunk)\n        self.recency.forget(manifest)\n", "                    self.ledger.release(chunk)\n"),
    ("tier_budgets.py", "the node tier shrinks last", "cluster = min(limits.cluster, there)\n    return TierBudgets(node=min(limits.node, there - cluster), cluster=cluster)", "node = min(limits.node, there)\n    return TierBudgets(node=node, cluster=min(limits.cluster, there - node))"),
    ("tier_budgets.py", "both may have all that is there", "there - cluster)", "there)"),
    ("tier_budgets.py", "less than nothing", "there = max(0, there)", "there = there"),
    ("tier_budgets.py", "who owns nothing has room for chunks", 'if "cluster" not in roles:', "if False:"),
    ("tier_budgets.py", "a cluster cache has room for files", 'if "node" not in roles:', "if False:"),
    ("tier_budgets.py", "a tenth of what is not there", "min(limit, there) // _", "limit // _"),
    ("tier_budgets.py", "the operator's word does not count", "cluster=tenth if cluster_limit is None else cluster_limit", "cluster=tenth"),
]  # fmt: skip
