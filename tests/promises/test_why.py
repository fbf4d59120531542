"""Every decision of a node is explained by what was recorded: who let it in, who pushed it out, whom force broke."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bdn.core.cache.index import Victim
from bdn.core.chunk import Digest
from bdn.core.errors import BdnError, StoreUnavailableError
from bdn.core.events import Event, explanation, verdict
from bdn.core.layout import Manifest
from bdn.wire.heartbeat_schema import Heartbeat, HeartbeatReply
from bdn.wire.operation_schema import EvictCommand, VerifyCommand
from node_agent.app import Agent
from node_agent.cache.records import CacheFiles
from node_agent.cache.space import Room, Space, TierBudgets
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Rig, staged, verified
from tests.support.content.noise import noise
from tests.support.promises.tally import Tally, at_scale

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases", "space")

Expected = Callable[[Event], bool] | None  # what an operation's victims must be said to have fallen to
SIZE, BUDGET = 300, 1000  # three of them fit


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"cache_bytes": BUDGET, "roles": "node"})


@pytest.fixture
async def agent(rig: Rig) -> AsyncIterator[Agent]:
    async with rig.agent() as agent:
        yield agent


def published(mirror: AgentMirror, count: int) -> list[Manifest]:
    return [mirror.publish({"f": noise(SIZE, seed)}) for seed in range(count)]


def story(agent: Agent, manifest: Manifest) -> list[Event]:
    """What stands in the journal about it, oldest first."""
    name = str(manifest.digest)
    return [one for one in agent.journal.events(name) if one.manifest == name][::-1]


def why(agent: Agent, manifest: Manifest) -> str:
    is_here = manifest.digest in agent.cache.index.manifests()
    return explanation(story(agent, manifest), "node-1", is_here=is_here)


def kinds(agent: Agent, manifest: Manifest) -> list[str]:
    return [one.kind for one in story(agent, manifest)]


def shrunk(patched: pytest.MonkeyPatch, node: int) -> None:
    """Others have filled the disk."""
    real = Space.room

    def room(space: Space, padding: int = 0) -> Room:
        return replace(real(space, padding), budgets=TierBudgets(node=node, cluster=0))

    patched.setattr(Space, "room", room)


async def used(agent: Agent, mirror: AgentMirror, manifests: Sequence[Manifest]) -> None:
    """Staged and released, one after the other."""
    for manifest in manifests:
        stage = await staged(agent, mirror, manifest, job="early")
        await agent.stages.release(stage.id)


async def test_who_is_refused_hears_who_is_in_the_way(agent: Agent, mirror: AgentMirror) -> None:
    manifests = published(mirror, 4)
    large = mirror.publish({"f": noise(BUDGET + 1, 99)})
    stages = [await staged(agent, mirror, one, job=f"job-{n}") for n, one in enumerate(manifests[:3])]
    for manifest in (manifests[3], large):
        with pytest.raises(BdnError):
            await staged(agent, mirror, manifest, job="late")

    refused = verdict(story(agent, manifests[3])).refused
    assert refused is not None
    assert refused.facts.items() >= {"needed": SIZE, "free": 100, "leased": 3 * SIZE}.items()
    in_the_way = refused.facts["in_the_way"]
    assert in_the_way == [f"job job-{n} (stage {one.id})" for n, one in enumerate(stages)]
    assert "was not admitted for job late" in why(agent, manifests[3])
    assert "1 KB can never fit a cache of 1 KB" in why(agent, large)
    assert kinds(agent, large) == ["refused", "failed"]


async def test_an_eviction_says_whom_it_spared_and_whom_it_broke(agent: Agent, mirror: AgentMirror) -> None:
    leased, free = published(mirror, 2)
    await used(agent, mirror, [free])
    stage = await staged(agent, mirror, leased, job="train-42")
    given: dict[str, Any] = {"all": True, "asked_by": "an operator of acme", "organisation": "acme"}
    await agent.evictions.evict(EvictCommand(id="evi_1", **given))

    spared = story(agent, leased)[-1]
    assert (spared.kind, spared.facts["eviction"]) == ("eviction_refused", "evi_1")
    assert spared.facts["holders"] == [f"job train-42 (stage {stage.id})"]
    assert "as an operator of acme requested (evi_1)" in why(agent, free)

    await agent.evictions.evict(EvictCommand(id="evi_2", force=True, **given))
    said = why(agent, leased)
    assert (
        f"by force as an operator of acme requested (evi_2), although it was in use by job train-42 (stage {stage.id})"
        in said
    )
    assert [one.facts["ending"] for one in story(agent, leased) if one.kind == "ended"] == ["forced"]
    document = agent.stages.document(agent.stages.registry.find(stage.id))
    assert document.error is not None
    assert "by a forced eviction" in document.error.message


async def test_a_lease_that_ran_out_says_when(agent: Agent, mirror: AgentMirror) -> None:
    (manifest,) = published(mirror, 1)
    stage = await agent.stages.start("job", mirror.grant(manifest), 3600)
    await agent.stages.finish(stage.record.id)
    await agent.stages.renew(stage.record.id, 7200)
    await agent.stages.lifecycle.release(stage, ending="expired")

    assert kinds(agent, manifest) == ["admitted", "arrived", "renewed", "ended"]
    assert "its lease expired at 20" in story(agent, manifest)[-1].sentence


async def test_what_a_neighbour_pushes_out_is_said_with_numbers(
    agent: Agent, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = published(mirror, 3)
    await used(agent, mirror, manifests)
    shrunk(monkeypatch, 700)
    await agent.cache.trim()

    gone = verdict(story(agent, manifests[0])).because
    assert gone is not None
    assert gone.kind == "trimmed"
    assert gone.facts.items() >= {"held": 900, "budget": 700, "allowed": BUDGET}.items()
    assert "because the tier held 900 B and other data fills the disk, which left the tier 700 B of 1 KB" in why(
        agent, manifests[0]
    )
    assert "is cached" in why(agent, manifests[1])


async def test_what_the_disk_did_not_let_go_is_said_to_be_there(
    agent: Agent, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = published(mirror, 4)
    await used(agent, mirror, manifests[:3])

    def fail(*_: object) -> None:
        raise StoreUnavailableError("the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(CacheFiles, "delete", fail)
        with pytest.raises(BdnError):
            await agent.evictions.evict(EvictCommand(id="evi_1", all=True))
        with pytest.raises(BdnError):
            await staged(agent, mirror, manifests[3])

    for manifest in manifests:
        assert verdict(story(agent, manifest)).is_here == (manifest.digest in agent.cache.index.manifests())
    assert "is still here: it could not be evicted" in why(agent, manifests[0])
    assert kinds(agent, manifests[3])[-1] == "failed"


async def test_that_something_goes_is_on_record_before_it_goes(
    agent: Agent, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed between the two leaves an event too many, and not a manifest too few."""
    manifests = published(mirror, 5)
    by_digest = {manifest.digest: manifest for manifest in manifests}
    real, looks = CacheFiles.delete, list[bool]()

    def delete(files: CacheFiles, victims: Sequence[Victim]) -> None:
        for victim in victims:
            looks.append(files.places.manifest(victim.manifest).exists())
            looks.append(not verdict(story(agent, by_digest[victim.manifest])).is_here)
        real(files, victims)

    monkeypatch.setattr(CacheFiles, "delete", delete)
    await used(agent, mirror, manifests)  # two make room
    await agent.evictions.evict(EvictCommand(id="evi_1", lru_bytes=1))
    shrunk(monkeypatch, SIZE)
    await agent.cache.trim()
    assert looks == [True] * 2 * 4


@pytest.mark.promise("corruption")
async def test_what_the_scrub_repairs_or_loses_is_on_record(agent: Agent, mirror: AgentMirror) -> None:
    (manifest,) = published(mirror, 1)
    await staged(agent, mirror, manifest)
    path = agent.places.file(manifest.files[0].digest)
    for repair in (False, True):
        path.chmod(0o644)
        path.write_bytes(bytes(SIZE))
        await verified(agent, VerifyCommand(id=f"ver_{repair}", all=True, repair=repair))

    damaged, repaired = (one.sentence for one in story(agent, manifest)[-2:])
    assert damaged.startswith(f"has a damaged part: {manifest.files[0].digest} of f in the tier node (")
    assert repaired.startswith(f"was repaired: {manifest.files[0].digest} of f in the tier node (")


# --- any sequence: the machine knows why, and the journal says the same ---


_OPERATIONS = [*["stage"] * 8, *["release"] * 3, "evict", "force", "trim", "expire"]


@dataclass
class Machine:
    """Does one thing after the other to an agent, and compares what left the cache with what is on record."""

    rig: Rig
    manifests: list[Manifest]
    choose: random.Random
    number: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0

    async def run(self, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        while self.number < steps:
            async with AsyncExitStack() as stack:
                agent = await stack.enter_async_context(self.rig.agent())
                await agent.heartbeats.beat()
                self._check(agent, set(), None, "start")
                for _ in range(self.choose.randint(3, 12)):
                    self.number += 1
                    before = set(agent.cache.index.manifests())
                    name = self.choose.choice(_OPERATIONS)
                    with monkeypatch.context() as patched:
                        expected = await getattr(self, f"_{name}")(agent, patched)
                    self._check(agent, before, expected, name)

    async def _stage(self, agent: Agent, _: pytest.MonkeyPatch) -> Expected:
        job, manifest = f"job-{self.number}", self.choose.choice(self.manifests)
        try:
            await staged(agent, self.rig.mirror, manifest, job=job)
        except BdnError as error:
            self.refused += 1
            told = verdict(story(agent, manifest))
            is_said = told.refused is not None and told.refused.facts["job"] == job
            if error.code != "CACHE_FULL" or not is_said:
                self.wrong.append(f"step {self.number}: {error}, but the journal says {told}")
        return lambda one: (one.kind, one.facts.get("job")) == ("made_room", job)

    async def _release(self, agent: Agent, _: pytest.MonkeyPatch) -> Expected:
        ready = [stage for stage in agent.stages.registry.all() if stage.record.state == "READY"]
        if ready:
            await agent.stages.release(self.choose.choice(ready).record.id)
        return None

    async def _evict(self, agent: Agent, _: pytest.MonkeyPatch, *, force: bool = False) -> Expected:
        chosen = [str(one.digest) for one in self.choose.sample(self.manifests, 2)]
        name = f"evi_{self.number}"
        await agent.evictions.evict(EvictCommand(id=name, manifests=chosen, force=force))
        return lambda one: one.kind == "evicted" and (one.facts["eviction"], one.facts["forced"]) == (name, force)

    async def _force(self, agent: Agent, patched: pytest.MonkeyPatch) -> Expected:
        return await self._evict(agent, patched, force=True)

    async def _trim(self, agent: Agent, patched: pytest.MonkeyPatch) -> Expected:
        budget = self.choose.choice([250, 500, 800])
        shrunk(patched, budget)
        await agent.cache.trim()
        return lambda one: (one.kind, one.facts.get("budget")) == ("trimmed", budget)

    async def _expire(self, agent: Agent, _: pytest.MonkeyPatch) -> Expected:
        ready = [stage for stage in agent.stages.registry.all() if stage.record.state == "READY"]
        if ready:
            await agent.stages.lifecycle.release(self.choose.choice(ready), ending="expired")
        return None

    def _check(self, agent: Agent, before: set[Digest], expected: Expected, name: str) -> None:
        index = agent.cache.index
        for manifest in self.manifests:
            told = verdict(story(agent, manifest))
            is_here = manifest.digest in index.manifests()
            is_explained = told.is_here == is_here
            if manifest.digest in before and not is_here:
                is_explained = is_explained and bool(expected and told.because and expected(told.because))
            if name == "start" and is_here:
                is_explained = is_explained and bool(told.because and told.because.kind == "found")
            if not is_explained:
                self.wrong.append(f"step {self.number}, {name}: here {is_here}, but the journal says {told}")


async def test_whatever_happens_the_last_event_about_a_manifest_explains_where_it_is(
    rig: Rig, mirror: AgentMirror, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, seed = at_scale(150, 800), 20261122
    machine = Machine(rig, published(mirror, 6), random.Random(seed))
    await machine.run(steps, monkeypatch)

    assert machine.wrong == [], f"seed {seed}"
    assert machine.refused
    tally.add(scenarios=machine.number, refused=machine.refused, wrong=len(machine.wrong))


# --- a mirror that is away ---


async def test_what_was_decided_while_the_mirror_was_away_is_told_when_it_is_back(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = published(mirror, 4)
    async with rig.agent() as agent:
        await used(agent, mirror, manifests[:1])

        def away(_: AgentMirror, __: Heartbeat) -> HeartbeatReply:
            raise StoreUnavailableError("the mirror is away")

        monkeypatch.setattr(AgentMirror, "beat", away)  # until after the agent has said its last word
        await used(agent, mirror, manifests[1:])  # the first makes room
        waiting = agent.journal.waiting
    monkeypatch.undo()
    assert waiting >= 9
    async with rig.agent() as agent:  # and it is restarted meanwhile
        async with asyncio.timeout(30):
            while agent.journal.waiting:  # noqa: ASYNC110 - heartbeats have nobody else to wake
                await asyncio.sleep(0.01)
        recorded = [one.id for one in agent.journal.events()][::-1]
    told = list(dict.fromkeys(_told(mirror)))
    assert told == recorded


def _told(mirror: AgentMirror) -> Iterator[str]:
    for beat in mirror.heartbeats:
        yield from (event.id for event in beat.events)
