"""Leases under clocks that jump, restarts, and holders that die: what a stage leases stays whole until its own time is over."""

import random
from pathlib import Path

import pytest

from bdn.wire.operation_schema import EvictCommand
from node_agent.app import Agent
from node_agent.stage.stage import NodeStage
from tests.support.agent.mirror import AgentMirror
from tests.support.agent.rig import Clock, Rig, noise
from tests.support.content.trees import tree
from tests.support.promises.tally import Scale, Tally

pytest_plugins = ("tests.support.agent.fixtures",)
pytestmark = pytest.mark.promise("leases")
DAY = 86400.0
FILES = [{"weights": noise(4000, number), "config.json": bytes([number])} for number in range(3)]


@pytest.fixture
def mirror(server: AgentMirror) -> AgentMirror:
    return server.renewed()


async def ready(
    agent: Agent, mirror: AgentMirror, number: int, ttl: float | None, *, job: str | None = None
) -> NodeStage:
    manifest = mirror.publish(FILES[number])
    await agent.heartbeats.beat()
    stage = await agent.stages.start(job or f"job-{number}", mirror.grant(manifest, expires_in=1e9), ttl)
    await agent.stages.finish(stage.record.id)
    return stage


def is_whole(agent: Agent, stage: NodeStage, number: int) -> bool:
    place = agent.stages.document(stage).mounts[0].path
    leased = all(map(agent.cache.index.leases.is_leased, stage.record.manifests))
    return leased and tree(Path(place)) == FILES[number]


@pytest.mark.parametrize("jump", [DAY, -DAY, 400 * DAY])
async def test_a_clock_that_is_set_neither_ends_a_lease_nor_prolongs_it(
    mirror: AgentMirror, tmp_path: Path, jump: float, tally: Tally
) -> None:
    wall, elapsed = Clock(), Clock(50.0)
    async with Rig(mirror, tmp_path).agent(wall, elapsed) as agent:
        stage = await ready(agent, mirror, 0, 100)
        wall.now += jump
        elapsed.now += 99
        await agent.housekeeping.reap()
        assert is_whole(agent, stage, 0)
        told = agent.stages.document(stage).expires_at
        assert told is not None
        assert abs(told.timestamp() - (wall.now + 1)) < 1e-3  # people are told by the clock that they see
        report = await agent.evictions.evict(EvictCommand(id="e", all=True))
        assert [item.refused for item in report] == [True]
        elapsed.now += 1
        await agent.housekeeping.reap()
        assert stage.record.state == "RELEASED"
    tally.add(scenarios=1, faults=1, refused=1)


async def test_whatever_clocks_restarts_and_renewals_do_a_stage_has_its_whole_time(
    mirror: AgentMirror, tmp_path: Path, scale: Scale, tally: Tally
) -> None:
    for seed in range(scale.of(2, 25)):
        await live(mirror, tmp_path / str(seed), seed, tally)


async def live(mirror: AgentMirror, root: Path, seed: int, tally: Tally) -> None:
    """One history against the plainest account of it: seconds with an agent since somebody last asked for the stage."""
    chance, wall, elapsed = random.Random(seed), Clock(), Clock(0.0)
    ttls: dict[int, float | None] = {}
    left: dict[int, float] = {}
    for _ in range(4):
        async with Rig(mirror, root).agent(wall, elapsed) as agent:
            left.update({number: ttl for number, ttl in ttls.items() if ttl is not None and number in left})
            for _ in range(8):
                what = chance.choice(["stage", "renew", "jump", "pass", "pass"])
                number, ttl = chance.randrange(3), chance.choice([None, 1.0, 60.0, 10 * DAY])
                if what == "jump":
                    wall.now += chance.choice([DAY, -DAY, 30 * DAY, -3600])
                elif what == "pass":
                    seconds = chance.choice([0.5, 30.0, 59.5, 2 * DAY])
                    wall.now, elapsed.now = wall.now + seconds, elapsed.now + seconds
                    left = {number: time - seconds for number, time in left.items()}
                elif what == "stage" and number not in ttls:
                    await ready(agent, mirror, number, ttl)
                    ttls[number] = ttl
                    left.update({} if ttl is None else {number: ttl})
                elif what == "renew" and number in ttls:
                    await agent.stages.renew(stage_of(agent, number).record.id, ttl)
                    ttls[number] = ttl
                    left.pop(number, None)
                    left.update({} if ttl is None else {number: ttl})
                await agent.housekeeping.reap()
                for over in [number for number, time in left.items() if time <= 0]:
                    assert stage_of(agent, over).record.state == "RELEASED", (seed, over)
                    del left[over], ttls[over]
                for number in ttls:
                    assert is_whole(agent, stage_of(agent, number), number), (seed, number)
                tally.add(scenarios=1, faults=what == "jump")
        elapsed.now = chance.choice([0.0, elapsed.now + 5 * DAY])  # down for long, or the machine was started anew


def stage_of(agent: Agent, number: int) -> NodeStage:
    return next(stage for stage in agent.stages.registry.all() if stage.record.job_id == f"job-{number}")


async def test_an_agent_that_was_down_for_longer_than_the_time_to_live_gives_it_again(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    wall, elapsed = Clock(), Clock(1e6)
    async with Rig(mirror, tmp_path).agent(wall, elapsed) as agent:
        await ready(agent, mirror, 0, 60)
    wall.now += DAY
    elapsed.now = 3.0  # the machine was started anew
    async with Rig(mirror, tmp_path).agent(wall, elapsed) as agent:
        stage = stage_of(agent, 0)
        elapsed.now += 59
        await agent.housekeeping.reap()
        assert is_whole(agent, stage, 0)
        elapsed.now += 1  # its holder is dead: it had all the time to renew
        await agent.housekeeping.reap()
        assert stage.record.state == "RELEASED"
        assert agent.cache.index.leases.leased() == ()
    tally.add(scenarios=2)


async def test_age_is_the_order_of_use_whatever_the_clock_says(
    mirror: AgentMirror, tmp_path: Path, tally: Tally
) -> None:
    wall = Clock()
    for jump, number in ((DAY, 0), (-2 * DAY, 1), (DAY / 2, 2)):
        async with Rig(mirror, tmp_path).agent(wall) as agent:  # what was used before the restart counts as well
            wall.now += jump
            stage = await ready(agent, mirror, number, None)
            await agent.stages.release(stage.record.id)
    async with Rig(mirror, tmp_path).agent(wall) as agent:
        assert agent.cache.index.manifests() == tuple(mirror.publish(files).digest for files in FILES)
        (gone,) = await agent.evictions.evict(EvictCommand(id="e", lru_bytes=1, tier="node"))
        assert gone.manifest == str(mirror.publish(FILES[0]).digest)
    tally.add(scenarios=3, faults=3)
