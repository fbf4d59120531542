"""How manifests leave the node: the index forgets them, the decision is recorded, the files are deleted, and then it is announced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bdn.core.cache.index import CacheIndex, EvictionPlan, EvictionReason, Victim
from bdn.core.digest import Digest
from bdn.core.errors import BdnError
from bdn.core.events import Event
from bdn.disk.durable import disk_errors
from node_agent.background_tasks import in_thread
from node_agent.cache.cache_events import Account, CacheEvents, kept
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.records import ManifestRecords
from node_agent.disk.places import Places


@dataclass(frozen=True)
class ScannedManifest:
    """A manifest as it is on disk: its contents, which of them are whole (True) or in progress (False), its last use."""

    manifest: Digest
    contents: Mapping[Digest, int]
    present: Mapping[Digest, bool]
    last_used: float

    def restore(self, index: CacheIndex) -> None:
        """Count it."""
        index.restore(self.manifest, self.contents, self.present, last_used=self.last_used)


@dataclass(frozen=True)
class CacheFiles:
    """The node tier on disk: records of manifests, and files whole or in progress. Blocking; methods raise ``DiskFailedError``."""

    places: Places
    records: ManifestRecords

    def delete(self, victims: Iterable[Victim]) -> None:
        """Records of manifests first, then contents: after a crash in between, the start-up scan deletes what nobody names."""
        for victim in victims:
            self.records.forget(victim.manifest)
            for content in victim.contents:
                for path in (self.places.file(content), self.places.part(content), self.places.bitmap(content)):
                    with disk_errors(path):
                        path.unlink(missing_ok=True)

    def left_of(self, victims: Iterable[Victim]) -> list[ScannedManifest]:
        """After a deletion that failed half-way: what is still recorded. Manifests without a record are gone."""
        found: list[ScannedManifest] = []
        for victim in victims:
            manifest = self.records.load(victim.manifest)
            if manifest is not None:
                last_used = self.records.last_used(victim.manifest)
                contents = manifest.contents
                found.append(ScannedManifest(victim.manifest, contents, self.present(contents), last_used))
        return found

    def present(self, contents: Mapping[Digest, int]) -> dict[Digest, bool]:
        """Which contents are on disk: whole (True), or in progress (False)."""
        found: dict[Digest, bool] = {}
        for content, size in contents.items():
            path = self.places.file(content)
            with disk_errors(path):
                if path.exists() and path.stat().st_size == size:
                    found[content] = True
                elif self.places.part(content).exists():
                    found[content] = False
        return found

    def unbegun(self, contents: Iterable[Digest]) -> list[Digest]:
        """Those of which not a byte is on disk."""
        with disk_errors(self.places.filling):
            return [content for content in contents if not self.places.part(content).exists()]


@dataclass(frozen=True)
class Evictor:
    """Evicts manifests, under the cache's lock. What a failing disk keeps is counted again, and recorded as kept."""

    index: CacheIndex
    files: CacheFiles
    chunks: HeldChunks
    events: CacheEvents

    async def evict(
        self, plan: Callable[[CacheIndex], EvictionPlan], reason: EvictionReason, account: Account
    ) -> EvictionPlan:
        """Carry out what ``plan`` decides about the index as it is now; ``account`` says why each manifest goes."""
        decided = plan(self.index)
        last_used = self.index.recency.last_used
        decisions = [account(victim, last_used(victim.manifest)) for victim in decided.victims]
        self.index.evict(decided)
        try:
            await in_thread(self.delete, decided.victims, decisions)
        except BdnError as error:
            left = await in_thread(self.files.left_of, decided.victims)
            for found in left:
                found.restore(self.index)
            await in_thread(self.events.decided, kept((found.manifest for found in left), error))
            raise
        finally:
            held = frozenset(self.index.manifests())
            self.announce([victim for victim in decided.victims if victim.manifest not in held], reason)
        return decided

    async def forget(self, manifests: Iterable[Digest], why: Sequence[Event]) -> None:
        """Drop manifests of which nothing is left to keep."""
        plan = self.index.plan(manifests)
        self.index.evict(plan)
        for victim in plan.victims:
            self.chunks.remove(victim.manifest)
        with suppress(BdnError):  # a record without content is rubbish, which the next start finds
            await in_thread(self.delete, plan.victims, why)

    def delete(self, victims: Sequence[Victim], decisions: Sequence[Event]) -> None:
        """Record the decisions, then delete: after a kill in between, people can still be told why. Blocking."""
        self.events.decided(decisions)
        self.files.delete(victims)

    def announce(self, victims: Sequence[Victim], reason: EvictionReason) -> None:
        """They are gone: nobody is served from them any more."""
        for victim in victims:
            self.chunks.remove(victim.manifest)
        if victims:
            self.events.evicted(reason, len(victims))
        self.events.changed()
