"""A bit that flips on the way: from an upstream to the mirror, and from its store to agents."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from bdn.core.chunk import CHUNK_SIZE, Digest, digest_of
from bdn.store.directory import DirectoryStore
from tests.doubles.faults import answer, flip_byte, stall
from tests.doubles.hub import Hub
from tests.support.agent.rig import noise
from tests.support.content.trees import tree
from tests.support.crash.rot import rot
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.scripted_upstreams import CONTENT, FILES, LARGE, SMALL, STALL, Pauses, ScriptedUpstream
from tests.support.mirror.service import LONGEST_SECONDS, Json, MirrorUnderTest, mirror_under_test, source, until
from tests.support.network.fault_proxy import FaultProxy, passes
from tests.support.network.fault_proxy_faults import flips_a_bit
from tests.support.promises.tally import Scale, Tally
from tests.support.services import services
from tests.support.services.commands import wait_until

pytest_plugins = ("tests.support.mirror.fixtures", "tests.support.mirror.upstream_fixtures")
pytestmark = pytest.mark.promise("corruption")
KINDS: Final = ["hf", "s3", "r2", "gs"]
CHUNKS: Final = [CONTENT[start : start + CHUNK_SIZE] for start in range(0, len(CONTENT), CHUNK_SIZE)]


@pytest.fixture
async def mirror(proxy: FaultProxy, no_turns: None, tmp_path: Path) -> AsyncIterator[MirrorUnderTest]:
    """It asks for one range after the other, so that it is known which chunk is hit."""
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses(), stall=STALL, transfers=1) as mirror:
        yield mirror


def flipped(content: bytes) -> bytes:
    """As the proxy leaves it."""
    wrong = bytearray(content)
    wrong[len(wrong) // 2] ^= 1
    return bytes(wrong)


def evidence(mirror: MirrorUnderTest) -> list[list[Digest]]:
    """What is kept of each file that came wrong."""
    rows = mirror.rows("quarantined_files")["quarantined_files"]
    return [[Digest.from_bytes(row[-1][at : at + 32]) for at in range(0, len(row[-1]), 32)] for row in rows]


@pytest.mark.parametrize("upstream", KINDS, indirect=True)
async def test_a_bit_flipped_on_the_wire_costs_the_file_once_more_and_only_its_wrong_chunk_is_kept(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, tally: Tally, scale: Scale
) -> None:
    hit = scale.of(1, 2)  # 2 is the last chunk, which is short
    proxy.play(*[passes] * hit, flips_a_bit)
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met["flips_a_bit"], wrong=found != FILES, repaired=1)
    assert proxy.met["flips_a_bit"] == 1
    assert found == FILES
    [kept] = evidence(mirror)
    assert kept == [digest_of(flipped(CHUNKS[hit]))]
    assert kept[0].fanout in mirror.chunks()
    assert len(upstream.reads(LARGE)) == 2 * len(CHUNKS)
    assert document["bytes_transferred"] == sum(map(len, FILES.values())) + len(CONTENT)
    assert b"bdn_mirror_quarantined_files 1.0" in (await mirror.http.get("/metrics")).content


@pytest.mark.parametrize("upstream", KINDS[1:], indirect=True)
async def test_a_bit_flipped_in_one_small_file_costs_that_file_once_more(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, proxy: FaultProxy, tally: Tally
) -> None:
    proxy.chosen = lambda asked: SMALL in asked and ("/o/" not in asked or "alt=media" in asked)
    proxy.play(flips_a_bit)
    document = await mirror.ready(upstream.wanted)

    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=proxy.met["flips_a_bit"], wrong=found != FILES, repaired=1)
    assert proxy.met["flips_a_bit"] == 1
    assert found == FILES
    assert evidence(mirror) == [[digest_of(flipped(FILES[SMALL]))]]
    assert [len(upstream.reads(path)) for path in FILES] == [len(CHUNKS), 2, 1]


@pytest.mark.parametrize("upstream", KINDS, indirect=True)
@pytest.mark.parametrize("path", [LARGE, SMALL])
async def test_what_comes_wrong_twice_is_never_published_and_ends_with_the_name_of_the_file(
    mirror: MirrorUnderTest, upstream: ScriptedUpstream, path: str, tally: Tally
) -> None:
    upstream.fail(flip_byte(at=10), file=path, times=None)
    error = await mirror.failed(upstream.wanted)
    asked, kept = len(upstream.reads(path)), evidence(mirror)
    upstream.script.clear()

    document = await mirror.ready(upstream.wanted)
    found = await mirror.tree(document["sources"][0]["manifest"])
    tally.add(scenarios=1, faults=asked, refused=1, wrong=found != FILES)
    assert error["code"] == "CHECKSUM_MISMATCH"
    assert repr(path) in error["message"]
    assert asked == 2 * (len(CHUNKS) if path == LARGE else 1), "once more, and not for ever"
    assert len(kept) == 2, kept
    assert kept[0] == kept[1] != []


async def test_a_bit_flipped_while_a_damaged_chunk_is_repaired_costs_that_range_once_more(
    upstreams: None, hub: Hub, tmp_path: Path, tally: Tally
) -> None:
    hub.repo("org/model").commit({LARGE: CONTENT})
    async with mirror_under_test(tmp_path / "mirror", pause=Pauses()) as mirror:
        await mirror.ready(source("hf://org/model"))
        rot(mirror.data_dir / "store" / "chunks" / digest_of(CHUNKS[1]).fanout, "flipped")
        hub.log.clear()
        hub.fail(flip_byte(at=10), origin="cdn")
        [item] = (await mirror.verify())["items"]
        tally.add(scenarios=1, faults=2, repaired=1)
        assert (item["outcome"], item["chunk"]) == ("repaired", str(digest_of(CHUNKS[1])))
        assert [one.bytes_served for one in hub.log.find(origin="cdn")] == [CHUNK_SIZE] * 2


# --- Wrong bytes of the mirror's store as agents meet them, and a mirror that is killed while it mends them: real processes ---
STORED_LARGE: Final = noise(2 * CHUNK_SIZE + 12345, 5)
ONE: Final = noise(3_000_000, 6)
STORED_SMALL: Final = {f"small/{number}.txt": f"small file {number}".encode() * 9 for number in range(12)}
TREE: Final = {"model.safetensors": STORED_LARGE, "one.bin": ONE, **STORED_SMALL}
MODEL: Final = source("hf://org/model")
OBJECTS: Final = (
    ONE,
    STORED_LARGE[CHUNK_SIZE : 2 * CHUNK_SIZE],
    b"".join(STORED_SMALL[path] for path in sorted(STORED_SMALL)),
)


@pytest.fixture
def model(hub: Hub) -> Iterator[Hub]:
    hub.repo("org/model").commit(TREE)
    yield hub
    hub.script.clear()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # httpx2 leaves a refused socket to itself
def test_a_stage_that_gets_wrong_bytes_makes_the_mirror_mend_them(model: Hub, tmp_path: Path, tally: Tally) -> None:
    environment = {"HF_ENDPOINT": model.url, "BDN_SCRUB_SECONDS": "0"}
    with (
        services.mirror(tmp_path / "mirror", **environment) as mirror,
        services.agent(tmp_path / "one", mirror.url, BDN_AGENT_CLUSTER="a") as one,
        services.agent(tmp_path / "two", mirror.url, BDN_AGENT_CLUSTER="b") as two,
    ):
        grant = mirror.ready("hf://org/model")["grant"]
        one.stage(grant, "first")
        holds = lambda: [each["manifests"] for each in mirror.http.get("/agents").json()["items"]] == [1, 0]  # noqa: E731
        wait_until(holds, seconds=60, what="the first agent's holdings")
        model.fail(answer(503), times=None)
        model.log.clear()
        for content, how in zip(OBJECTS, ("truncated", "flipped", "zeroed"), strict=True):
            rot(mirror.store / "chunks" / digest_of(content).fanout, how)
        stage = two.stage(grant, "second")
        wrong = int(tree(Path(stage["mounts"][0]["path"])) != TREE)
        assert services.metric(mirror.http, "bdn_mirror_repaired_chunks_total") == len(OBJECTS)
        assert services.metric(mirror.http, "bdn_mirror_evidence_chunks") == len(OBJECTS)
        assert services.metric(mirror.http, "bdn_mirror_damaged_chunks") == 0
        for content in OBJECTS:
            wrong += (mirror.store / "chunks" / digest_of(content).fanout).read_bytes() != content
        assert model.log.count() == 0, "the upstream was asked although an agent had it"
        tally.add(scenarios=len(OBJECTS), faults=len(OBJECTS), repaired=len(OBJECTS), wrong=wrong)


async def test_a_mirror_killed_between_the_steps_of_a_repair_goes_on_with_it(
    upstreams: None, model: Hub, tmp_path: Path, tally: Tally, scale: Scale
) -> None:
    store, random, kills = tmp_path / "store/chunks", Random(20261122), scale.of(1, 12)
    async with await ServingProcess.start(tmp_path, BDN_SCRUB_SECONDS="0") as mirror:
        assert (await mirror.ended(await mirror.begin(MODEL)))["status"] == "READY"
    asked: list[str] = []
    for round_number in range(kills):
        content = OBJECTS[round_number % len(OBJECTS)]
        rot(store / digest_of(content).fanout, random.choice(("flipped", "truncated", "zeroed", "absent")))
        async with await ServingProcess.start(tmp_path, BDN_SCRUB_SECONDS="0") as mirror:
            model.log.clear()
            if round_number % 2 == 0:
                model.fail(stall(), "repos|resolve-cache")
            asked.append((await mirror.http.post("/verifications", json={"all": True})).json()["id"])
            if round_number % 2 == 0:
                await asyncio.to_thread(model.log.wait_for, "repos|resolve-cache")  # its right bytes are on their way
            else:
                await until(lambda mirror=mirror: mirror.query("SELECT 1 FROM damaged_chunks"))  # type: ignore[misc]
            assert await mirror.end(signal.SIGKILL) == -signal.SIGKILL
        model.script.clear()
        async with await ServingProcess.start(tmp_path, BDN_SCRUB_SECONDS="0") as mirror:
            found = (await mirror.http.get(f"/verifications/{asked[-1]}", params={"wait": LONGEST_SECONDS})).json()
            assert found["status"] == "DONE", found
            assert mirror.query("SELECT * FROM damaged_chunks") == []
            served = [(await mirror.http.get(f"/chunks/{digest_of(each)}")).content for each in OBJECTS]
        tally.add(scenarios=1, faults=1, kills=1, repaired=1, wrong=served != list(OBJECTS))
    assert not list((tmp_path / "store/incoming").iterdir())


@pytest.mark.promise("collection")
async def test_what_an_eviction_takes_while_it_is_verified_is_not_called_damaged(
    upstreams: None, model: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    loop = asyncio.get_running_loop()
    evicted: list[Json] = []
    faults: list[str | None] = []
    fault = DirectoryStore.fault
    async with mirror_under_test(tmp_path / "mirror", scrub_seconds=0, tombstone_seconds=0) as mirror:
        await mirror.ready(MODEL)

        async def evict() -> Json:
            document = await mirror.evict(all=True, tier="mirror")
            await mirror.collect(grace_seconds=0)
            return document

        def evict_first(store: DirectoryStore, digest: object) -> str | None:
            if not evicted:
                evicted.append(asyncio.run_coroutine_threadsafe(evict(), loop).result(LONGEST_SECONDS))
            faults.append(fault(store, digest))  # type: ignore[arg-type]
            return faults[-1]

        monkeypatch.setattr(DirectoryStore, "fault", evict_first)
        found = await mirror.verify()
        assert (found["status"], found["items"]) == ("DONE", [])
        assert evicted[0]["status"] == "DONE"
        assert faults[0] == "it is absent"
        assert mirror.count("damaged_chunks") == 0
    tally.add(scenarios=1)


async def test_of_two_processes_one_reads_the_store_and_the_other_takes_over_where_it_was(
    upstreams: None, model: Hub, postgres_url: str, tmp_path: Path, tally: Tally
) -> None:
    shared: dict[str, Any] = {"database_url": postgres_url, "store": f"file://{tmp_path}/store"}
    size = sum(map(len, TREE.values()))

    async def verify(mirror: MirrorUnderTest, how: str) -> None:
        rot(tmp_path / "store/chunks" / digest_of(ONE).fanout, how)
        found = await mirror.verify()
        assert [item["outcome"] for item in found["items"]] == ["repaired"]
        assert found["bytes_read"] == size

    async with mirror_under_test(tmp_path / "b", scrub_seconds=0, **shared) as last:
        async with mirror_under_test(tmp_path / "a", scrub_seconds=0, **shared) as first:
            await first.ready(MODEL)
            await verify(first, "flipped")
            read = [await one.metric("bdn_mirror_scrubbed_bytes_total") for one in (first, last)]
            assert sorted(read) == [0, size], "both read it"
        await verify(last, "zeroed")
    content = (tmp_path / "store/chunks" / digest_of(ONE).fanout).read_bytes()
    tally.add(scenarios=2, faults=2, repaired=2, wrong=content != ONE)
