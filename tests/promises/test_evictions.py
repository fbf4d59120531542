"""Evictions that come between the steps of a stage of the same manifest, and stages between the steps of an eviction."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bdn.core.errors import BdnError
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.app import Agent
from tests.support.agent.mirror import FORMS, AgentMirror
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.agent.steps import Steps
from tests.support.content.noise import noise
from tests.support.content.trees import tree
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases")
SHARED = {"tokenizer.json": noise(30_000, 1)}
FILES = {"weights": noise(2_000_000, 2), "config.json": b"{}", "empty": b"", **SHARED}
OTHER = {"other": noise(50_000, 3), **SHARED}
HARDEST = ("if-unused", "whole")  # what was held goes before it is admitted
CASES = [
    (form, kind, before)
    for kind in ("plan", "if-unused", "force")
    for before in ("absent", "whole", "half")
    for form in (FORMS if (kind, before) == HARDEST else ("packed",))
]
SEED = 20261122


@pytest.fixture
async def agent(mirror: AgentMirror, tmp_path: Path) -> AsyncIterator[Agent]:
    async with Rig(mirror, tmp_path, {"cluster_cache_bytes": 0}).agent() as agent:
        yield agent


@pytest.mark.promise("whole-files")
@pytest.mark.parametrize(("mirror", "kind", "before"), CASES, indirect=["mirror"])
async def test_an_eviction_between_any_two_steps_of_a_stage_leaves_no_hole(
    agent: Agent,
    mirror: AgentMirror,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    before: str,
    tally: Tally,
) -> None:
    case = Case(agent, mirror, Steps(agent, monkeypatch), kind)
    total = await case.count(before)
    few = 12 if (kind, before) == HARDEST else 2
    for step in random.Random(SEED).sample(range(1, total + 1), min(total, at_scale(few, 24))):
        await case.run(before, step, tally)


@pytest.mark.promise("whole-files", "space")
async def test_a_stage_between_any_two_steps_of_an_eviction_has_all_its_files(
    agent: Agent, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    case = Case(agent, mirror, Steps(agent, monkeypatch), "if-unused")
    for step in range(1, at_scale(6, 40) + 1):
        await case.run_in(step, tally)


@dataclass
class Case:
    """One agent, and the manifest that is staged and evicted."""

    agent: Agent
    mirror: AgentMirror
    steps: Steps
    kind: str

    def __post_init__(self) -> None:
        self.manifest, self.other = self.mirror.publish(FILES), self.mirror.publish(OTHER)

    async def count(self, before: str) -> int:
        """How many calls a stage makes that nothing comes between."""
        await self._prepare(before)
        self.steps.aim(0, self._evict)
        await staged(self.agent, self.mirror, self.manifest)
        self.steps.rest()
        return self.steps.passed

    async def run(self, before: str, step: int, tally: Tally) -> None:
        """The eviction comes before that call. Whatever comes of it, what the job was told is so."""
        agent, case = self.agent, f"step {step}"
        await self._prepare(before)
        self.steps.aim(step, self._evict)
        (outcome,) = await asyncio.gather(staged(agent, self.mirror, self.manifest), return_exceptions=True)
        self.steps.rest()
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, BdnError), (case, self.steps.last, outcome)
            assert (self.kind, outcome.code) == ("force", "CANCELED"), (case, self.steps.last, outcome)
            tally.add(refused=1)
        case = f"step {step}, {self.steps.last}"
        if self.steps.between:
            await self.steps.between
        (found,) = [one for one in agent.stages.registry.all() if one.record.job_id == "job"]
        place = Path(agent.stages.document(found).mounts[0].path)
        self._check(found.record.state, place, case)
        again = await staged(agent, self.mirror, self.manifest)
        assert tree(Path(again.mounts[0].path)) == FILES, case
        self._check("READY", place, case)
        await agent.stages.release(again.id)
        tally.add(scenarios=1)

    async def run_in(self, step: int, tally: Tally) -> None:
        """The stage begins before that call of the eviction."""
        agent, steps = self.agent, self.steps
        await self._prepare("whole")
        steps.aim(step, lambda: staged(agent, self.mirror, self.manifest))
        await self._evict()
        steps.rest()
        stage = await (steps.between or staged(agent, self.mirror, self.manifest))
        self._check("READY", Path(stage.mounts[0].path), f"step {step}, {steps.last}")
        await agent.stages.release(stage.id)
        tally.add(scenarios=1)

    def _check(self, state: str, place: Path, case: str) -> None:
        index, digest = self.agent.cache.index, self.manifest.digest
        assert state in ("READY", "RELEASED"), case
        if state == "READY":
            assert tree(place) == FILES, f"{case}: a hole"
            assert index.is_complete(digest), f"{case}: READY and not held"
            assert index.leases.is_leased(digest), f"{case}: READY and not leased"
        else:
            assert not place.exists(), case
        ledger = index.ledger
        assert (ledger.committed_bytes, ledger.reserved_bytes) == (disk_bytes(self.agent.places.root), 0), case

    async def _prepare(self, before: str) -> None:
        """Nothing of the manifest is held, or all of it, or what another one names as well."""
        await self.agent.evictions.evict(EvictCommand(id="clear", all=True, force=True))
        if before != "absent":
            manifest = self.manifest if before == "whole" else self.other
            stage = await staged(self.agent, self.mirror, manifest, job="earlier")
            await self.agent.stages.release(stage.id)

    async def _evict(self) -> list[EvictedItem]:
        command = EvictCommand(id="between", all=True, dry_run=self.kind == "plan", force=self.kind == "force")
        return await self.agent.evictions.evict(command)
