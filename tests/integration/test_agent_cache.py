"""The cache's promises, kept by a whole agent: space, order of eviction, leases, evictions on request."""

from pathlib import Path

import pytest

from bdn.core.chunk import Digest
from bdn.core.errors import BdnError
from bdn.core.layout import Manifest
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.app import Agent
from tests.support.agent.mirror import AgentMirror, fresh_mirror
from tests.support.agent.rig import Rig, disk_bytes, staged
from tests.support.content.noise import MIB, noise

pytest_plugins = ("tests.support.agent.fixtures",)
mirror = fresh_mirror


@pytest.fixture
def rig(mirror: AgentMirror, tmp_path: Path) -> Rig:
    return Rig(mirror, tmp_path, {"cache_bytes": 4 * MIB})


def published(mirror: AgentMirror, seed: int, size: int = MIB, *, files: int = 2) -> Manifest:
    """A tree of so many bytes that shares nothing with those of other seeds."""
    return mirror.publish({f"{number}.bin": noise(size // files, seed * 100 + number) for number in range(files)})


async def used_and_released(agent: Agent, mirror: AgentMirror, *manifests: Manifest) -> None:
    for manifest in manifests:
        stage = await staged(agent, mirror, manifest, job=str(manifest.digest))
        await agent.stages.release(stage.id)


def held(agent: Agent) -> set[Digest]:
    return {manifest for manifest in agent.cache.index.manifests() if agent.cache.index.is_complete(manifest)}


async def test_what_can_never_fit_is_refused_with_numbers_and_evicts_nothing(rig: Rig, mirror: AgentMirror) -> None:
    small, large = published(mirror, 1), published(mirror, 2, 5 * MIB)
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, small)
        for wanted in ([large], [published(mirror, 3, 3 * MIB), published(mirror, 4, 2 * MIB)]):
            with pytest.raises(BdnError) as caught:
                await staged(agent, mirror, *wanted)

            assert caught.value.code == "CACHE_TOO_SMALL"
            assert caught.value.details() == {"needed_bytes": 5 * MIB, "budget_bytes": 4 * MIB}
        assert held(agent) == {small.digest}
        assert agent.cache.index.ledger.reserved_bytes == 0
        assert agent.cache.index.leases.leased() == ()


async def test_the_order_of_use_survives_a_restart(rig: Rig, mirror: AgentMirror) -> None:
    one, two, three, four, large = *(published(mirror, seed) for seed in range(4)), published(mirror, 9, 2 * MIB)
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one, two, three, four, one)
        order = agent.cache.index.manifests()
    async with rig.agent() as agent:
        assert agent.cache.index.manifests() == order == (two.digest, three.digest, four.digest, one.digest)
        await staged(agent, mirror, large)
        assert held(agent) == {four.digest, one.digest, large.digest}


async def test_lowering_the_budget_evicts_what_nobody_needs(rig: Rig, mirror: AgentMirror) -> None:
    one, two, three = (published(mirror, seed) for seed in range(3))
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one, two)
        await staged(agent, mirror, three)
    async with rig.agent(cache_bytes=MIB) as agent:
        assert held(agent) == {three.digest}
        assert disk_bytes(rig.cache) == MIB


# --- evictions on request ---


async def evict(agent: Agent, **selector: object) -> list[EvictedItem]:
    return await agent.evictions.evict(EvictCommand.model_validate({"id": "evc_1", **selector}))


def gone(items: list[EvictedItem]) -> dict[str, int]:
    return {item.manifest: item.bytes for item in items if not item.refused}


async def test_force_of_a_plan__ends_the_holders_that_it_named_and_refuses_for_others(
    rig: Rig, mirror: AgentMirror
) -> None:
    used, other = published(mirror, 1), published(mirror, 2)
    wanted = {"manifests": [str(used.digest), str(other.digest)], "force": True}
    async with rig.agent() as agent:
        await staged(agent, mirror, other, job="first")
        early = await staged(agent, mirror, used, job="early")
        planned = [holder for item in await evict(agent, **wanted, dry_run=True) for holder in item.holders]
        late = await staged(agent, mirror, used, job="late")

        done = await evict(agent, **wanted, plan="evc_0", holders=planned)

        assert gone(done) == {str(other.digest): MIB}
        assert [item.holders for item in done if item.refused] == [[f"job late (stage {late.id})"]]
        leases = agent.cache.index.leases.holders(used.digest)
        assert {holder.stage_id for holder in leases} == {early.id, late.id}
        planned.append(f"job late (stage {late.id})")
        assert gone(await evict(agent, **wanted, plan="evc_0", holders=planned)) == {str(used.digest): MIB}


async def test_evictions_select_by_manifest_by_job_by_age_and_everything(rig: Rig, mirror: AgentMirror) -> None:
    one, two, three, four = (published(mirror, seed) for seed in range(4))
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one, two, three, four)

        planned = await evict(agent, all=True, dry_run=True)
        every = {one.digest, two.digest, three.digest, four.digest}
        assert gone(planned) == dict.fromkeys(map(str, every), MIB)
        assert held(agent) == every

        assert gone(await evict(agent, manifests=[str(two.digest)])) == {str(two.digest): MIB}
        for other in ("", str(three.digest)[:-1], f"{three.digest}0", "*"):  # a job is named whole
            assert await evict(agent, job=other) == []
        assert gone(await evict(agent, job=str(three.digest))) == {str(three.digest): MIB}  # its released stage knows
        assert gone(await evict(agent, lru_bytes=1)) == {str(one.digest): MIB}
        items = await evict(agent, all=True)
        assert gone(items) == {str(four.digest): MIB}
        assert items[0].model_dump(exclude={"manifest", "bytes"}) == {
            "tier": "node",
            "cluster": "default",
            "node": "node-1",
            "sources": ["hf://org/model-0"],
            "refused": False,
            "holders": [],
            "restorable_until": None,
        }
        assert (held(agent), disk_bytes(rig.cache)) == (set(), 0)
        assert list((rig.cache / "manifests").iterdir()) == []
        assert await evict(agent, manifests=[str(one.digest)]) == []
