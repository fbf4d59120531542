"""Evictions on a node, killed at every call to the disk that they make, one after the other; each time the agent starts again.

``python -m tests.support.crash.eviction_kills SEEDS`` prints what was tried and what was wrong, as JSON.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bdn.core.chunk import Digest
from bdn.wire.operation_schema import EvictCommand
from tests.support.agent.cache_oracle_of_files import broken_views, differences, ready_on_disk, wrong_files
from tests.support.agent.local_node import LocalNode
from tests.support.content.trees import tree
from tests.support.crash.killed_disk import KilledNode, MortalDisk, one_history

KINDS: Final = ("plan", "if-unused", "lru", "force")
BUDGET: Final = 10**9  # for all


class Directory(KilledNode):
    """A directory with four manifests, two of them leased, as it stands before an eviction; and what was wrong after one."""

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__(root, seed, manifests=4)
        self.copy = root / "before"
        self.stages: dict[str, Digest] = {}  # READY ones
        self.unleased: list[Digest] = []

    def run(self) -> None:
        """Every kind of eviction, killed at its first call to the disk, at its second, and so on to its end."""
        asyncio.run(self._prepare())
        self.cache.rename(self.copy)
        for kind in KINDS:
            step = 0
            is_dead = True
            while is_dead and not self.faults:
                step += 1
                is_dead = self._killed_at(kind, step)
                self.counts["scenarios"] += 1
                self.counts["kills"] += is_dead
            self.counts[f"steps of {kind}"] = step

    async def _prepare(self) -> None:
        async with self.node(BUDGET) as node:
            for number, manifest in enumerate(sorted(self.world.manifests)):
                stage = await node.stages.start(f"job-{number}", str(manifest))
                await node.stages.finish(stage.record.id)
                if number % 2:
                    await node.stages.release(stage.record.id)
                    self.unleased.append(manifest)
                else:
                    self.stages[stage.record.id] = manifest
                self.wall.now += 1

    def _killed_at(self, kind: str, step: int) -> bool:
        """Whether there was such a step."""
        shutil.rmtree(self.cache, ignore_errors=True)
        subprocess.run(["cp", "-a", self.copy, self.cache], check=True)  # as it was, hard links and all
        disk = self.disk = MortalDisk(step)
        self.live(self._evict(kind, step))
        before = len(self.faults)
        self._look(kind)
        asyncio.run(self._start_again(kind))
        case = f"{kind}, killed at step {step} ({disk.last}): " if disk.is_dead else f"{kind}, not killed: "
        self.faults[before:] = [case + fault for fault in self.faults[before:]]
        return disk.is_dead

    # --- the eviction ---

    def _command(self, kind: str) -> EvictCommand:
        if kind == "lru":
            return EvictCommand(id="evc", lru_bytes=10**9)
        if kind == "force":
            return EvictCommand(id="evc", manifests=[str(one) for one in self._asked(kind)], force=True)
        return EvictCommand(id="evc", all=True, dry_run=kind == "plan")

    def _asked(self, kind: str) -> list[Digest]:
        """What goes if nothing comes between."""
        leased = sorted(self.stages.values())
        return {"plan": [], "force": [leased[0], self.unleased[0]]}.get(kind, self.unleased)

    def _staying(self, kind: str) -> dict[str, tuple[Digest, ...]]:
        """The stages that an eviction may not touch."""
        asked = self._asked(kind)
        return {stage: (manifest,) for stage, manifest in self.stages.items() if manifest not in asked}

    async def _evict(self, kind: str, step: int) -> None:
        async with self.node(BUDGET) as node:
            await node.settled()
            with self.disk.mounted():
                self.disk.die_at(step)
                await node.evictions.evict(self._command(kind))
                self.disk.die_at(0)

    # --- what is left ---

    def _look(self, kind: str) -> None:
        """With plain reads, as a job does: views are whole, and one that is taken away by force is whole or gone."""
        self.faults += [f"{name} is wrong" for name in wrong_files(self.cache)]
        self.faults += broken_views(self.cache, self.world, self._staying(kind), {})
        for stage, manifest in self.stages.items():
            place = self.cache / "mounts" / stage / "m0"
            if place.is_dir() and tree(place) != self.world.files[manifest]:
                self.faults.append(f"the view of {stage} has a hole")

    async def _start_again(self, kind: str) -> None:
        async with self.node(BUDGET) as node:
            await node.settled()
            self._check(node, kind)
            again = await node.evictions.evict(self._command(kind))
            await node.settled()
            refused = {item.manifest for item in again if item.refused}
            held = set(node.cache.index.manifests())
            if kind != "force" and refused != {str(one) for one in self.stages.values()}:
                self.faults.append(f"what is leased was not refused: {refused}")
            if held != set(self.world.manifests) - set(self._asked(kind)):
                self.faults.append("the eviction, asked for again, does not come to its end")
            self._check(node, kind)

    def _check(self, node: LocalNode, kind: str) -> None:
        self.faults += differences(node, self.cache, self._staying(kind), {})
        index, asked = node.cache.index, self._asked(kind)
        for manifest in self.world.manifests:
            if manifest not in index.manifests() and manifest not in asked:
                self.faults.append(f"{manifest} went without being asked for")
            if manifest in index.manifests() and not index.is_complete(manifest):
                self.faults.append(f"{manifest} was evicted in part")
        ready = {manifest for manifests in ready_on_disk(self.cache).values() for manifest in manifests}
        self.faults += [f"{one} is READY and not held" for one in ready if one not in index.manifests()]
        self._look(kind)


def run(seeds: int) -> dict[str, Any]:
    """So many directories; stops at the first where something is wrong."""
    counts: Counter[str] = Counter()
    for seed in range(1, seeds + 1):
        with one_history() as root:
            directory = Directory(root, seed)
            directory.run()
        counts.update(directory.counts)
        if directory.faults:
            return {"seed": seed, "counts": counts, "faults": directory.faults[:20]}
    return {"seed": seeds, "counts": counts, "faults": []}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
