"""The cache's promises, kept by a whole agent: space, order of eviction, leases, evictions on request."""

# ruff: noqa: ASYNC110, ASYNC240 - a test's loop has nobody else to serve

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from bdn.core.chunk import Digest, Manifest
from bdn.core.errors import BdnError, GrantExpiredError, InvalidRequestError
from bdn.wire.operation_schema import EvictCommand, EvictedItem
from node_agent.app import Agent
from node_agent.cache.records import Held
from node_agent.fetch.documents import Catalogue
from node_agent.stage.stage import NodeStage
from tests.support.agent.mirror import AgentMirror, Fault, failing, in_both_forms
from tests.support.agent.rig import MIB, Rig, disk_bytes, noise, staged
from tests.support.content.trees import tree

pytest_plugins = ("tests.support.agent.fixtures",)


@pytest.fixture
def mirror(server: AgentMirror, request: pytest.FixtureRequest) -> AgentMirror:
    return server.renewed(is_packed=getattr(request, "param", "packed") == "packed")


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


@in_both_forms
async def test_what_two_manifests_share_is_counted_once_and_stays_for_either(rig: Rig, mirror: AgentMirror) -> None:
    shared = noise(MIB, 1)
    one = mirror.publish({"shared": shared, "own": noise(MIB, 2)})
    two = mirror.publish({"shared": shared, "own": noise(MIB, 3)})
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one)
        mirror.forget()
        await used_and_released(agent, mirror, two)
        assert mirror.requests == 1
        assert agent.cache.index.ledger.committed_bytes == disk_bytes(rig.cache) == 3 * MIB

        await staged(agent, mirror, published(mirror, 4, 2 * MIB), job="other")

        assert held(agent) >= {two.digest}
        assert one.digest not in agent.cache.index.manifests()
        assert disk_bytes(rig.cache) == 4 * MIB  # the shared file, the own one of the second, and the new two


@in_both_forms
async def test_files_of_a_failed_stage_stay_counted_and_are_not_fetched_again(rig: Rig, mirror: AgentMirror) -> None:
    manifest = mirror.publish({"good": noise(MIB, 1), "bad": noise(MIB, 2)})
    bad = mirror.chunks(manifest, "bad")[0]
    good = mirror.chunks(manifest, "good")[0]
    store, mirror.store = mirror.store, type(mirror.store)()
    with store.open(good) as file:
        mirror.store.put(good, bytearray(file.read()))
    async with rig.agent(byte_threads=1) as agent:
        with pytest.raises(BdnError, match="does not exist"):
            await staged(agent, mirror, manifest)
        assert agent.cache.index.leases.leased() == ()
        use = (await agent.holdings.tiers())["node"]
        assert use.committed + use.reserved == disk_bytes(rig.cache)
        mirror.store = store
        mirror.forget()

        await staged(agent, mirror, manifest)

        assert mirror.chunk_requests[bad] == 1
        assert mirror.chunk_requests[good] <= 1


async def test_lowering_the_budget_evicts_what_nobody_needs(rig: Rig, mirror: AgentMirror) -> None:
    one, two, three = (published(mirror, seed) for seed in range(3))
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one, two)
        await staged(agent, mirror, three)
    async with rig.agent(cache_bytes=MIB) as agent:
        assert held(agent) == {three.digest}
        assert disk_bytes(rig.cache) == MIB


async def test_what_is_evicted_between_the_look_and_the_admission_is_filled_again(
    rig: Rig, mirror: AgentMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = published(mirror, 1)
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, manifest)
        real = Catalogue.obtain

        async def obtain(catalogue: Catalogue, digest: Digest, bearer: str, *, is_complete: bool) -> Held:
            found = await real(catalogue, digest, bearer, is_complete=is_complete)
            if is_complete:
                await agent.evictions.evict(EvictCommand(id="evc_1", all=True))
            return found

        monkeypatch.setattr(Catalogue, "obtain", obtain)
        stage = await staged(agent, mirror, manifest)

        assert tree(Path(stage.mounts[0].path)).keys() == {"0.bin", "1.bin"}
        assert stage.mounts[0].bytes_from.mirror == MIB
    async with rig.agent() as agent:
        assert held(agent) == {manifest.digest}


# --- evictions on request ---


async def evict(agent: Agent, **selector: object) -> list[EvictedItem]:
    return await agent.evictions.evict(EvictCommand.model_validate({"id": "evc_1", **selector}))


def gone(items: list[EvictedItem]) -> dict[str, int]:
    return {item.manifest: item.bytes for item in items if not item.refused}


async def test_evictions_select_by_manifest_by_job_by_age_and_everything(rig: Rig, mirror: AgentMirror) -> None:
    one, two, three, four = (published(mirror, seed) for seed in range(4))
    async with rig.agent() as agent:
        await used_and_released(agent, mirror, one, two, three, four)

        planned = await evict(agent, all=True, dry_run=True)
        assert gone(planned) == {
            str(one.digest): MIB,
            str(two.digest): MIB,
            str(three.digest): MIB,
            str(four.digest): MIB,
        }
        assert held(agent) == {one.digest, two.digest, three.digest, four.digest}

        assert gone(await evict(agent, manifests=[str(two.digest)])) == {str(two.digest): MIB}
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


@pytest.mark.parametrize("exposure", ["none", "symlink"])
async def test_a_forced_eviction_releases_the_stages_that_it_breaks(
    rig: Rig, mirror: AgentMirror, caplog: pytest.LogCaptureFixture, exposure: str
) -> None:
    one = published(mirror, 1)
    async with rig.agent(exposure=exposure) as agent:
        stage = await staged(agent, mirror, one, job="training")

        assert gone(await evict(agent, manifests=[str(one.digest)], force=True)) == {str(one.digest): MIB}

        document = agent.stages.document(agent.stages.registry.find(stage.id))
        assert document.state == "RELEASED"
        assert document.error is not None
        assert "by a forced eviction" in document.error.message
        assert not Path(stage.mounts[0].path).exists()
        assert disk_bytes(rig.cache) == 0
        assert f"takes it away from job training (stage {stage.id})" in caplog.text


@pytest.mark.parametrize("selector", [{}, {"all": True, "job": "x"}, {"manifests": ["rubbish"]}])
async def test_an_eviction_of_rubbish_is_refused(rig: Rig, mirror: AgentMirror, selector: dict[str, object]) -> None:
    async with rig.agent() as agent:
        with pytest.raises(InvalidRequestError):
            await evict(agent, **selector)


@dataclass
class SharedFill:
    """A leader that fills a file, and a follower that waits for it; the mirror answers once ``gate`` is set."""

    gate: threading.Event
    chunk: Digest
    leader: NodeStage
    follower: NodeStage


SHARED = noise(MIB, 1)


async def shared_fill(agent: Agent, mirror: AgentMirror, instead: Fault | None = None) -> SharedFill:
    one, two = mirror.publish({"shared": SHARED}), mirror.publish({"shared": SHARED, "own": b"own"})
    (chunk,) = mirror.chunks(one, "shared")
    gate, asked = mirror.hold(chunk, instead)
    leader = await agent.stages.start("leader", mirror.grant(one))
    await asked.wait()
    follower = await agent.stages.start("follower", mirror.grant(two))
    while follower.progress is None or agent.stages.document(follower).mounts[0].bytes_done < len(b"own"):
        await asyncio.sleep(0)
    return SharedFill(gate, chunk, leader, follower)


@in_both_forms
async def test_two_stages_that_need_the_same_file_fetch_it_once(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent() as agent:
        fill = await shared_fill(agent, mirror)
        await agent.stages.release(fill.leader.record.id)  # the leader is gone; the fill goes on
        fill.gate.set()
        stage = await agent.stages.finish(fill.follower.record.id)

        assert mirror.chunk_requests[fill.chunk] == 1
        assert tree(Path(stage.mounts[0].path)) == {"shared": SHARED, "own": b"own"}


@in_both_forms
async def test_a_follower_goes_on_with_its_own_grant_when_the_leaders_ends(rig: Rig, mirror: AgentMirror) -> None:
    async with rig.agent() as agent:
        fill = await shared_fill(agent, mirror, failing(GrantExpiredError("just now")))
        fill.gate.set()
        with pytest.raises(BdnError) as caught:
            await agent.stages.finish(fill.leader.record.id)
        stage = await agent.stages.finish(fill.follower.record.id)

        assert caught.value.code == "GRANT_EXPIRED"
        assert stage.state == "READY"
        assert mirror.chunk_requests[fill.chunk] == 2
