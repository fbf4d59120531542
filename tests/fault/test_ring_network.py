"""Members of a cluster die, hang, lie, leave and join on a real network: the others finish, right, and spare the mirror."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.hub import Hub
from tests.support.agent.rig import noise
from tests.support.agent.ring_of_agents import Content, Member, planted, ring
from tests.support.network import network
from tests.support.services import services
from tests.support.services.commands import wait_until

pytestmark = pytest.mark.skipif(bool(network.unavailable()), reason=network.unavailable() or "there is a network")

FILES = {f"part-{number}": noise(6 * CHUNK_SIZE, number) for number in range(2)}
SIZE = sum(map(len, FILES.values()))
RATE = 200_000_000  # bits per second


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Content]:
    root = tmp_path_factory.mktemp("content")
    source = root / "source"
    source.mkdir()
    for name, file in FILES.items():
        (source / name).write_bytes(file)
    with Hub() as hub:
        hub.repo("org/model").commit(FILES)
        yield planted(source, root / "mirror", "hf://org/model", HF_ENDPOINT=hub.url)


@pytest.fixture
def net() -> Iterator[network.Network]:
    with network.network() as built:
        yield built


def test_members_that_die_vanish_or_hang_cost_nobody_else_the_stage(
    net: network.Network, tmp_path: Path, content: Content
) -> None:
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


def test_members_that_lie_leave_or_join_cost_nobody_else_the_stage(
    net: network.Network, tmp_path: Path, content: Content
) -> None:
    # At half the rate: on a machine that is busy with other tests, the network is to be what members wait for, not the CPU.
    with ring(net, tmp_path, content, 3, RATE // 2) as built:
        liar, leaving, other = built.members
        content.check(liar.agent.stage(built.grant, "first"))
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
            # Only the liar had it: once more for all others, and of the half that one read who left, what it had not passed on.
            assert built.host.sent_bytes - before < 1.5 * SIZE
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
