"""The state machine of a node's cache, killed at a random call to the disk, thousands of times, on one directory.

``python -m tests.support.crash.cache_kills SEED CYCLES`` prints what was tried, as JSON, and what was wrong: a seed is a history.
"""

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.wire.operation_schema import EvictCommand
from node_agent.metrics import AgentMetrics
from node_agent.settings import AgentSettings
from node_agent.stage.stage import StageRecord, StageRegistry
from tests.fakes.clock import Clock
from tests.support.agent.cache_oracle_of_files import Wound, broken_views, differences, ready_on_disk, wrong_files
from tests.support.agent.cache_world import World
from tests.support.agent.local_node import LocalNode, content_files, local_node
from tests.support.crash.killed_disk import MortalDisk, one_history

_JOBS = 5
_OPERATIONS = 40  # of one life, if it is not killed before


class Machine:
    """One history of a node without a network. ``faults`` is what was wrong. ``ready`` is what was acknowledged, ``leaving`` what may or may not be there any more.

    What was acknowledged stays, whatever is killed, damaged or does not fit any more: a stage that cannot be mended says so,
    and shows what it showed.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.cache = root, root / "cache"
        self.world = World.of(seed, 6)
        self.disk = MortalDisk(seed)
        self.wall, self.elapsed = Clock(), Clock(0.0)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.chance = random.Random(seed)
        self.ready: dict[str, tuple[Digest, ...]] = {}
        self.leaving: dict[str, tuple[Digest, ...]] = {}
        self.most = 0
        self.ending = 0  # operations at work that may end stages
        self.damaged: set[str] = set()  # files that are to be found out by the next start
        self.wounds: dict[str, Wound] = {}  # of stages, until they say that they are whole
        total = sum(self.world.contents().values())
        self.budgets = total // 2, total * 3 // 4

    # --- lives ---

    def cycle(self) -> None:
        """One life, killed or not, and a look at what it left."""
        self.disk.die_at(int(self.chance.expovariate(1 / 120)) + 1)
        with self.disk.mounted():
            try:
                asyncio.run(self._live())
            except BaseException:
                if not self.disk.is_dead:
                    raise
        self.counts["kills"] += self.disk.is_dead
        self._look("after the kill" if self.disk.is_dead else "after the end")
        if self.chance.random() < 0.1:
            self._damage()
        if self.chance.random() < 0.05:  # a mirror would have heard all that; a long journal takes long to open
            shutil.rmtree(self.cache / "journal", ignore_errors=True)

    async def _live(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # tasks of a dead process report no errors
        settings = AgentSettings(
            data_dir=self.root,
            cache_bytes=self.chance.choice(self.budgets),
            headroom_bytes=0,
            cluster_cache_bytes=0,
            exposure="symlink",
        )
        metrics = AgentMetrics(StageRegistry())
        async with local_node(settings, self.world, metrics, self.wall, self.elapsed) as node:
            self.ending, self.most = 0, node.cache.index.ledger.used_bytes
            await self._settled(node)
            self._recognise(node)
            for _ in range(_OPERATIONS):
                await asyncio.gather(*(self._operate(node) for _ in range(self.chance.choice([1, 1, 2]))))
                if self.chance.random() < 0.3:
                    await self._settled(node)
                    self._compare(node)

    async def _settled(self, node: LocalNode) -> None:
        await node.settled()
        self.disk.check()

    def _recognise(self, node: LocalNode) -> None:
        """What was leaving has left, or has not."""
        ready = {stage.record.id for stage in node.stages.registry.all() if stage.record.state == "READY"}
        self.ready |= {name: manifests for name, manifests in self.leaving.items() if name in ready}
        self.leaving.clear()
        self._compare(node)
        self.damaged.clear()

    def _compare(self, node: LocalNode) -> None:
        self.counts["scenarios"] += 1
        for stage in node.stages.registry.all():
            self.counts["kept as they were"] += bool(stage.record.state == "READY" and stage.record.error)
            if stage.record.error is None:
                self.wounds.pop(stage.record.id, None)
        found = differences(node, self.cache, self.ready, self.wounds)
        used, budget = node.cache.index.ledger.used_bytes, node.cache.space.room().budgets.node
        if used > max(budget, self.most):
            found.append(f"{used} bytes are in use, of {budget}")
        self.most = used  # a budget that was lowered is kept to as stages end, and is never gone further beyond
        found += broken_views(self.cache, self.world, self.ready, self.wounds)
        self.faults += found

    def _look(self, when: str) -> None:
        """With plain reads, as a job does that goes on while the agent is dead."""
        found = [name for name in wrong_files(self.cache) if name not in self.damaged]
        found += broken_views(self.cache, self.world, self.ready, self.wounds)
        self.faults += [f"{when} ({self.disk.last}): {one}" for one in found]

    def _damage(self) -> None:
        """Somebody takes a file away, or makes it shorter, while no agent is there."""
        files = content_files(self.cache)
        if files:
            name = self.chance.choice(sorted(files))
            size = files[name].stat().st_size
            is_torn = size > 0 and self.chance.random() < 0.5
            if is_torn:
                files[name].chmod(0o600)
                with files[name].open("r+b") as file:
                    file.truncate(self.chance.randrange(size))
            else:
                files[name].unlink()
            self.damaged.add(name)
            self.counts["faults"] += 1
            self._wound(Digest(name), is_torn=is_torn)

    def _wound(self, content: Digest, *, is_torn: bool) -> None:
        for stage_id, manifests in ready_on_disk(self.cache).items():
            if any(content in self.world.sizes_of(manifest) for manifest in manifests):
                wound = self.wounds.setdefault(stage_id, Wound())
                wound.taken.add(content)
                if is_torn:
                    wound.torn.add(content)

    # --- operations ---

    async def _operate(self, node: LocalNode) -> None:
        what: Callable[[LocalNode], Awaitable[object]] = self.chance.choices(
            [self._stage, self._release, self._evict, self._renew, self._expire, self._reap], [6, 3, 3, 1, 1, 1]
        )[0]
        self.wall.now += 1
        is_ending = what in (self._release, self._evict, self._expire)
        self.ending += is_ending
        try:
            await what(node)
        except BdnError as error:
            self.counts["refused"] += 1
            self.counts[f"refused: {error.code}"] += 1
        self.ending -= is_ending

    async def _stage(self, node: LocalNode) -> None:
        some = self.chance.sample(sorted(self.world.manifests), self.chance.choice([1, 1, 1, 2]))
        token = " ".join(str(digest) for digest in some)
        node.provision.failing = self.chance.random() < 0.15
        job = f"job-{self.chance.randrange(_JOBS)}"
        stage = await node.stages.start(job, token, self.chance.choice([None, None, 50.0]))
        await node.stages.finish(stage.record.id)
        self.counts["ready"] += 1
        if stage.record.id not in self.leaving or not self.ending:
            self.leaving.pop(stage.record.id, None)
            self.ready[stage.record.id] = tuple(stage.record.manifests)

    def _leaves(self, record: StageRecord) -> None:
        self.ready.pop(record.id, None)
        self.leaving[record.id] = tuple(record.manifests)

    async def _release(self, node: LocalNode) -> None:
        if self.ready:
            stage_id = self.chance.choice(sorted(self.ready))
            self._leaves(node.stages.registry.find(stage_id).record)
            await node.stages.release(stage_id)

    async def _evict(self, node: LocalNode) -> None:
        kind = self.chance.choice(["all", "lru", "some", "plan", "force"])
        command: dict[str, Any] = {"id": "evc", "dry_run": kind == "plan", "force": kind == "force"}
        if kind == "lru":
            command["lru_bytes"] = self.chance.choice([1, 1000, 5000])
        elif kind in ("some", "force"):
            command["manifests"] = [str(one) for one in self.chance.sample(sorted(self.world.manifests), 2)]
        else:
            command["all"] = True
        for stage in node.stages.registry.all():
            if kind == "force" and {str(one) for one in stage.record.manifests} & set(command["manifests"]):
                self._leaves(stage.record)
        items = await node.evictions.evict(EvictCommand(**command))
        self.counts["refused"] += sum(item.refused for item in items)

    async def _renew(self, node: LocalNode) -> None:
        if self.ready:
            await node.stages.renew(self.chance.choice(sorted(self.ready)), self.chance.choice([None, 1.0, 50.0]))

    async def _expire(self, node: LocalNode) -> None:
        self.wall.now += self.chance.choice([0, 86400.0, -86400.0, 8 * 86400.0])
        self.elapsed.now += self.chance.choice([5.0, 60.0, 400.0])
        for stage in node.stages.registry.all():
            if stage.deadline is not None and stage.deadline <= self.elapsed.now:
                self._leaves(stage.record)
        await node.housekeeping.reap()

    async def _reap(self, node: LocalNode) -> None:
        await node.housekeeping.reap()


def run(seed: int, cycles: int) -> dict[str, Any]:
    """So many cycles; stops at the first that finds something wrong."""
    began = time.process_time()
    done = 0
    with one_history() as root:
        machine = Machine(root, seed)
        while done < cycles and not machine.faults:
            machine.cycle()
            done += 1
    seconds = time.process_time() - began
    return {"seed": seed, "cycles": done, "seconds": seconds, "counts": machine.counts, "faults": machine.faults[:20]}


def main() -> None:
    seed, cycles = map(int, sys.argv[1:3])
    if os.environ.get("PYTHONHASHSEED") != str(seed):  # a set of names has another order in each process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": str(seed)})
    print(json.dumps(run(seed, cycles)))


if __name__ == "__main__":
    main()
