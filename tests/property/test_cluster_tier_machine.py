"""The cluster tier on a real disk: what it says is what is there, whatever happens while a chunk is read or written."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bdn.core.chunk import Digest, digest_of
from bdn.core.errors import BdnError, CacheFullError, CacheTooSmallError, DiskFailedError, StoreUnavailableError
from bdn.disk.direct import DirectWrites
from node_agent.cache.cache_events import over_budget
from node_agent.cache.cluster_tier import IN_USE_SECONDS, ChunkFiles, ClusterTier
from tests.support.agent.cache import NO_EVENTS
from tests.support.content.names import named

CONTENT = {digest_of(bytes([number]) * size): bytes([number]) * size for number, size in enumerate((1, 2, 3, 4, 5))}
MANIFESTS = [named(f"manifest {number}") for number in range(3)]
chunks, manifests = st.sampled_from(list(CONTENT)), st.sampled_from(MANIFESTS)
Held = dict[Digest, tuple[int, float]]  # bytes and last use by manifest, least recently used first
Deed = tuple[str, Digest, Digest]  # what others do while a chunk is on its way: verb, manifest, chunk
deeds = st.lists(st.tuples(st.sampled_from(["bring", "evict", "lose", "open"]), manifests, chunks), max_size=3)


@pytest.fixture(autouse=True, scope="module")
def nobody_waits_for_the_disk() -> Iterator[None]:
    """Nothing here is about power cuts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fdatasync", lambda _: None)
        yield


class InterruptedFiles(ChunkFiles):
    """``meanwhile`` happens once, after the next chunk is written and before it has a name.

    The disk fails instead of removing more than ``removable`` chunks.
    """

    meanwhile: Callable[[], None] | None = None
    removable = sys.maxsize

    def write(self, chunk: Digest, content: memoryview) -> None:
        super().write(chunk, content)
        if self.meanwhile:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()

    def remove(self, manifest: Digest, chunk: Digest) -> None:
        if not self.removable:
            raise DiskFailedError(chunk.hex, "Read-only file system")
        self.removable -= 1
        super().remove(manifest, chunk)


class ClusterTierMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(4, 12))
    def build(self, budget: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.budget = budget
        self.now = 1000.0
        self.start()

    def start(self) -> None:
        self.files = InterruptedFiles(self.root, DirectWrites())
        self.tier = ClusterTier(self.files, lambda: self.budget, lambda: self.now, NO_EVENTS)
        self.now = max(self.now, self.tier.load())

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def happen(self, deeds: list[Deed]) -> None:
        for verb, manifest, chunk in deeds:
            if verb == "bring":
                self.tier.keep(manifest, chunk, memoryview(CONTENT[chunk]))
            elif verb == "evict":
                self.evict(manifest)
            elif verb == "lose":
                self.tier.lose(chunk)
            else:
                self.read(chunk)

    def evict(self, *manifests: Digest) -> None:
        self.tier.evict(manifests, None, "request", over_budget("cluster", 0, 0, 0))

    def read(self, chunk: Digest) -> bool:
        file = self.tier.open(chunk)
        if file is None:
            return False
        with file:
            assert file.read() == CONTENT[chunk]
        return True

    def oldest(self, held: Held, size: int, candidates: list[Digest]) -> list[Digest] | None:
        """The first candidates that free ``size`` bytes; None: all together do not."""
        for count in range(len(candidates) + 1):
            if sum(held[one][0] for one in candidates[:count]) >= size:
                return candidates[:count]
        return None

    @rule(manifest=manifests, chunk=chunks, passed=st.sampled_from([0, 61]), reading=deeds, written=deeds)
    def bring(self, manifest: Digest, chunk: Digest, passed: int, reading: list[Deed], written: list[Deed]) -> None:
        self.now += passed
        before, buffer = self.tier.held(), memoryview(bytearray(len(CONTENT[chunk])))
        over = sum(size for size, _ in before.values()) + len(buffer) - self.budget
        idle = [one for one, (_, used) in before.items() if one != manifest and self.now - used >= IN_USE_SECONDS]
        victims = self.oldest(before, over, idle)

        def read(room: memoryview) -> None:
            assert victims is not None
            assert list(self.tier.held()) == [one for one in before if one not in victims]
            self.happen(reading)
            room[:] = CONTENT[chunk]
            self.files.meanwhile = lambda: self.happen(written)

        try:
            self.tier.bring(manifest, chunk, buffer, read)
        except (CacheFullError, CacheTooSmallError):
            assert victims is None
            assert self.tier.held() == before
            return
        assert self.read(chunk)

    @rule(manifest=manifests, chunk=chunks, reading=deeds)
    def bring_what_does_not_come(self, manifest: Digest, chunk: Digest, reading: list[Deed]) -> None:
        if self.tier.holds(chunk):
            return

        def read(_: memoryview) -> None:
            self.happen(reading)
            raise StoreUnavailableError("it is down")

        with pytest.raises(BdnError):
            self.tier.bring(manifest, chunk, memoryview(bytearray(len(CONTENT[chunk]))), read)
        assert not self.read(chunk)

    @rule(deeds=deeds)
    def others_come_and_go(self, deeds: list[Deed]) -> None:
        self.happen(deeds)

    @rule(chunk=chunks)
    def evict_what_is_being_read(self, chunk: Digest) -> None:
        file = self.tier.open(chunk)
        if file is not None:
            manifest = self.tier.manifest_of(chunk)
            assert manifest is not None
            self.evict(manifest)
            assert self.tier.open(chunk) is None
            with file:
                assert file.read() == CONTENT[chunk]

    @rule(elsewhere=st.frozensets(chunks))
    def drop(self, elsewhere: frozenset[Digest]) -> None:
        self.tier.drop(elsewhere.__contains__)
        assert not any(map(self.read, elsewhere))

    @rule(removable=st.integers(0, 3), manifest=manifests, chunk=chunks, is_bringing=st.booleans())
    def the_disk_keeps_what_shall_go(self, removable: int, manifest: Digest, chunk: Digest, is_bringing: bool) -> None:
        """What it keeps is held as before, and as old as it was; it can be evicted when the disk is well."""
        self.now += 61
        before = {one: used for one, (_, used) in self.tier.held().items()}
        self.files.removable = removable
        try:
            if is_bringing:
                self.tier.keep(manifest, chunk, memoryview(CONTENT[chunk]))
            else:
                with suppress(DiskFailedError):
                    self.evict(*MANIFESTS)
        finally:
            self.files.removable = sys.maxsize
        for one, (_, used) in self.tier.held().items():
            assert used == before.get(one) or (is_bringing and one == manifest)

    @rule(budget=st.integers(0, 12))
    def trim(self, budget: int) -> None:
        before, self.budget = self.tier.held(), budget
        self.tier.trim()
        victims = self.oldest(before, sum(size for size, _ in before.values()) - budget, list(before))
        assert victims is not None
        assert list(self.tier.held()) == [one for one in before if one not in victims]

    @rule(chunk=chunks)
    def somebody_takes_a_chunk_away(self, chunk: Digest) -> None:
        for path in self.root.rglob(chunk.hex):
            path.unlink()
        assert not self.read(chunk)

    @rule()
    def crash_and_restart(self) -> None:
        before = {manifest: size for manifest, (size, _) in self.tier.held().items()}
        (self.root / "incoming" / "17").write_bytes(b"half")
        self.start()
        assert {manifest: size for manifest, (size, _) in self.tier.held().items()} == before

    @invariant()
    def the_disk_holds_what_the_tier_says_and_nothing_else(self) -> None:
        if not hasattr(self, "root"):
            return
        assert not list((self.root / "incoming").iterdir())
        on_disk = {path for path in (self.root / "chunks").rglob("*") if path.is_file()}
        by_manifest = {manifest: self.tier.chunks_of(manifest) for manifest in self.tier.held()}
        named = {self.root / "chunks" / one.hex / chunk.hex for one, held in by_manifest.items() for chunk in held}
        assert on_disk == named
        assert all(path.read_bytes() == CONTENT[Digest(path.name)] for path in on_disk)
        assert len({path.name for path in on_disk}) == len(on_disk)
        sizes = {manifest: sum(len(CONTENT[chunk]) for chunk in held) for manifest, held in by_manifest.items()}
        assert {manifest: size for manifest, (size, _) in self.tier.held().items()} == sizes
        for chunk in CONTENT:
            names = [manifest for manifest, held in by_manifest.items() if chunk in held]
            assert names == ([self.tier.manifest_of(chunk)] if self.tier.holds(chunk) else [])
        ledger = self.tier.ledger
        assert (ledger.committed_bytes, ledger.reserved_bytes) == (sum(sizes.values()), 0)
        assert ledger.committed_bytes <= self.budget


TestClusterTierMachine = ClusterTierMachine.TestCase
TestClusterTierMachine.settings = settings(
    max_examples=settings().max_examples // 4, stateful_step_count=30, deadline=None
)
