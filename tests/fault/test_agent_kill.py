"""Agents that are killed in the middle of their work, alone and in a ring whose network fails."""

import asyncio
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.wire.stage_schema import StageRequest
from node_agent.fill.part import SYNC_CHUNKS
from tests.doubles.hub import Hub
from tests.support.agent.mirror import AgentMirror, held_by
from tests.support.agent.process import Program
from tests.support.agent.rig import disk_bytes, noise
from tests.support.agent.ring_of_agents import Content, Member, planted, ring
from tests.support.content.trees import tree
from tests.support.network import network
from tests.support.services import services
from tests.support.services.commands import wait_until

CHUNKS = 22
STUCK = 2  # chunks, and slabs, that do not come before the agent is killed


def striped(chunks: int) -> bytes:
    """Chunks that differ, made quickly."""
    return b"".join(index.to_bytes(8, "big") * (CHUNK_SIZE // 8) for index in range(1, chunks + 1))


async def test_a_killed_agent_goes_on_from_its_bitmap_and_with_the_slabs_that_it_had_not_committed(
    tmp_path: Path,
) -> None:
    small = {f"{number:03}.bin": number.to_bytes(4, "big") * 2500 for number in range(120)}
    files = {"weights": striped(CHUNKS), **small}
    with AgentMirror(is_packed=True, slab_size=100_000).running() as mirror:
        program = Program(tmp_path, mirror.url, {"BDN_AGENT_BYTE_THREADS": str(2 * STUCK)})
        manifest = mirror.publish(files)
        slab_of = {path: mirror.chunks(manifest, path)[0] for path in small}
        chunks, slabs = mirror.chunks(manifest, "weights"), list(dict.fromkeys(slab_of.values()))
        gate, last = threading.Event(), {*chunks[-STUCK:], *slabs[-STUCK:]}
        # Every thread waits for one of the last, so that all others have come.
        stuck = mirror.asked(lambda _: mirror.chunk_requests.keys() >= last)
        for chunk in last:
            mirror.faults[chunk] = [held_by(gate)]
        async with program.daemon() as daemon:
            stage = await daemon.client.stage(StageRequest(job_id="job", grant=mirror.grant(manifest)))
            async with asyncio.timeout(60):
                await stuck.wait()
                while not any((tmp_path / "cache/files").glob("*/[!.]*")):  # noqa: ASYNC110 - slabs are being committed
                    await asyncio.sleep(0.01)
            await daemon.kill()
        gate.set()
        left = {path.name: path.read_bytes() for path in (tmp_path / "cache/files").glob("*/[!.]*")}
        assert all(digest_of(content).hex == name for name, content in left.items())
        lacking = {slab_of[path] for path, content in small.items() if digest_of(content).hex not in left}
        assert lacking >= last - set(chunks)
        mirror.forget()

        async with program.daemon() as daemon:
            ready = await daemon.client.stage_by_id(stage.id, 60)

            assert (ready.state, ready.error) == ("READY", None)
            assert tree(Path(ready.mounts[0].path)) == files
            assert mirror.chunk_requests.keys() - set(chunks) == lacking
            assert mirror.requests == len(mirror.chunk_requests) <= len(lacking) + STUCK + SYNC_CHUNKS - 1
            assert ready.mounts[0].bytes_from.node >= SYNC_CHUNKS * CHUNK_SIZE + 10_000 * len(left)
            assert disk_bytes(tmp_path / "cache") == manifest.bytes_total
            assert list((tmp_path / "cache/filling").iterdir()) == []
            cache = await daemon.client.cache()
            assert cache.tiers["node"].committed == manifest.bytes_total
            assert [held.held_by for held in cache.manifests] == [["job"]]


# --- Members of a cluster die, hang, lie, leave and join on a real network: the others finish, right, and spare the mirror ---
PARTS = {f"part-{number}": noise(8 * CHUNK_SIZE, number) for number in range(2)}
SIZE = sum(map(len, PARTS.values()))
RATE = 200_000_000  # bits per second


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Content]:
    root = tmp_path_factory.mktemp("content")
    source = root / "source"
    source.mkdir()
    for name, file in PARTS.items():
        (source / name).write_bytes(file)
    with Hub() as hub:
        hub.repo("org/model").commit(PARTS)
        yield planted(source, root / "mirror", "hf://org/model", HF_ENDPOINT=hub.url)


@pytest.fixture
def net() -> Iterator[network.Network]:
    with network.network() as built:
        yield built


@pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable() or "there is a network")
def test_members_that_die_cost_nobody_else_the_stage(net: network.Network, tmp_path: Path, content: Content) -> None:
    with ring(net, tmp_path, content, 4, RATE) as built:
        killed, vanished, hung, *others = built.members
        before = built.host.sent_bytes
        stages = built.begin()
        _wait_for_half(others[0], 0)
        killed.agent.process.kill()
        vanished.host.cut()
        hung.agent.process.send_signal(signal.SIGSTOP)
        try:
            _check(content, others, stages[3:])
            assert built.host.sent_bytes - before < 2 * SIZE  # what died with the three; each by itself would read all
        finally:
            hung.agent.process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable() or "there is a network")
def test_members_that_lie_cost_nobody_else_the_stage(net: network.Network, tmp_path: Path, content: Content) -> None:
    # At half the rate: on a machine that is busy with other tests, the network is to be what members wait for, not the CPU.
    # A disk that fails changes no file's times; here they are changed, so these agents do not look at them.
    (tmp_path / "sitecustomize.py").write_text(
        "from node_agent.disk.whole_files import WholeFiles\nWholeFiles.is_as_left = lambda *_: True\n"
    )
    with ring(net, tmp_path, content, 3, RATE // 2, PYTHONPATH=str(tmp_path)) as built:
        liar, leaving, other = built.members
        hosts = [built.host, *(member.host for member in built.members)]
        for host in hosts:
            host.shape(20 * RATE)
        content.check(liar.agent.stage(built.grant, "first"))
        for host in hosts:
            host.shape(RATE // 2)
        _corrupt(liar)
        before, had = built.host.sent_bytes, other.host.received_bytes
        stages = [member.agent.begin(built.grant, "job") for member in (leaving, other)]
        with services.starting_agent(tmp_path / "node-5", built.mirror.url, net.host()) as late:
            _wait_for_half(other, had)
            leaving.agent.process.send_signal(signal.SIGTERM)
            wait_until(lambda: services.answers(late.http), seconds=120, what="the agent that joins")
            stage = late.stage(built.grant, "job")
            _check(content, [other], stages[1:])
            content.check(stage)
            # Only the liar had it: once more for all others, and what one read who left and had not passed on: its share of the ring.
            # Did each read for itself, the mirror would send twice the size to those two alone who end their stage.
            assert built.host.sent_bytes - before < 2 * SIZE
            spent = other.agent.finished(stages[1])["transfer"]
            assert spent["bytes_hedged"] <= SIZE // 20
            assert services.metric(other.agent.http, "bdn_agent_verification_failures_total") >= 1


def _wait_for_half(member: Member, before: int) -> None:
    wait_until(lambda: member.host.received_bytes - before > SIZE // 2, seconds=120, what="half of the content")


def _check(content: Content, members: Sequence[Member], stages: Sequence[str]) -> None:
    for member, stage in zip(members, stages, strict=True):
        content.check(member.agent.finished(stage))


def _corrupt(liar: Member) -> None:
    """One byte of every chunk that it holds is another, as a disk would do it that fails."""
    files = [path for path in (liar.agent.shell.data / "cache" / "files").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) == SIZE
    for path in files:
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, CHUNK_SIZE):
                file.seek(start)
                byte = file.read(1)[0]
                file.seek(start)
                file.write(bytes([byte ^ 1]))
