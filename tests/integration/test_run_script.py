"""Process 1 of a rank, in a sandbox with its own processes, under each shell that an image may have."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.run.liveness import Liveness, make_alive
from tests.support.agent.pod import RankPod, shells
from tests.support.agent.runs import needs_bwrap
from tests.support.waiting import until

pytestmark = [needs_bwrap, pytest.mark.parametrize("shell", shells(), ids=lambda path: Path(path).name)]
FOREVER = "while :; do sleep 5; done"


@pytest.fixture
def pod(tmp_path: Path) -> RankPod:
    return RankPod(tmp_path / "pod", "http://127.0.0.1:1", "run0000001")


def write(pod: RankPod, *commands: str) -> None:
    pod.directory.env.write_text("export NAME='a b'\n")
    pod.directory.output.touch()
    script = Path(__file__).parents[2] / "node_agent/run/start.sh"
    (pod.directory.shared / "start.sh").write_bytes(script.read_bytes())
    for number, command in enumerate(commands):
        (pod.directory.shared / f"command.{number:03}").write_text(command)
    make_alive(pod.directory.alive)


@pytest.fixture
def life(pod: RankPod) -> Iterator[Liveness]:
    make_alive(pod.directory.alive)
    with Liveness(pod.directory) as life:
        yield life


def output(pod: RankPod) -> list[str]:
    """Without what shells say of processes that a signal ended."""
    lines = pod.directory.output.read_text().splitlines()
    return [line for line in lines if not re.search(r"\b(Killed|Terminated)\b", line)]


CODES = {
    "true": ([], 0),
    'echo "$NAME"; exit 3': (["a b"], 3),
    "kill -9 $$": ([], 137),
    "kill -TERM $$": ([], 143),
    "nosuchprogram 2>/dev/null": ([], 127),
}


@pytest.mark.parametrize("command", CODES)
async def test_rank__ends_by_itself__its_code_is_that_of_the_first_failure(
    pod: RankPod, life: Liveness, shell: str, command: str
) -> None:
    lines, code = CODES[command]
    write(pod, "echo first", command, "echo third")
    with pod.main(shell=shell) as main:
        await until(lambda: pod.directory.is_ready)
        assert (life.look(), output(pod)) == ("ALIVE", [])
        pod.directory.go()
        assert await main.exit_code() == code
    assert life.look() == "ENDED"
    assert pod.directory.exit_code() == code
    assert output(pod) == ["first", *lines, *([] if code else ["third"])]


STOPPED = {
    "polite": ("trap 'echo saw it; exit 5' TERM; echo up; sleep 100 & wait", ["up", "saw it"], 5),
    "plain": ("echo up; exec sleep 100", ["up"], 143),
    "deaf": (f"trap '' TERM; echo up; {FOREVER}", ["up"], 137),
    "deaf behind": (f"(trap '' TERM; echo up; {FOREVER}) & trap 'exit 0' TERM; {FOREVER}", ["up"], 143),
}


@pytest.mark.parametrize("kind", STOPPED)
async def test_rank__stopped__ends_with_its_command_s_code_or_by_force(
    pod: RankPod, life: Liveness, shell: str, kind: str
) -> None:
    command, lines, code = STOPPED[kind]
    write(pod, command, "echo never")
    pod.directory.go()
    with pod.main(shell=shell, is_quick=True) as main:
        await until(lambda: output(pod) == ["up"])
        main.signal(signal.SIGTERM)
        assert await main.exit_code() == code
    assert life.look() == "ENDED"
    assert pod.directory.exit_code() == code
    assert output(pod) == lines


async def test_rank__stopped_before_it_may_go__runs_no_command(pod: RankPod, life: Liveness, shell: str) -> None:
    write(pod, "echo never")
    with pod.main(shell=shell) as main:
        await until(lambda: pod.directory.is_ready)
        main.signal(signal.SIGTERM)
        assert await main.exit_code() == 143
    assert (life.look(), output(pod)) == ("ENDED", [])


async def test_rank__killed__is_seen_to_end_and_leaves_no_code(pod: RankPod, life: Liveness, shell: str) -> None:
    write(pod, f"echo up; {FOREVER} & {FOREVER}")
    pod.directory.go()
    with pod.main(shell=shell) as main:
        await until(lambda: output(pod) == ["up"])
        main.signal(signal.SIGKILL)
        assert await main.exit_code() == 137
    assert (life.look(), pod.directory.exit_code()) == ("ENDED", None)


@pytest.mark.parametrize("has_fifo", [True, False], ids=["unread", "as of an agent"])
async def test_rank__without_a_reader_of_its_fifo__does_not_wait_for_one(
    pod: RankPod, shell: str, has_fifo: bool
) -> None:
    write(pod, "echo up")
    if not has_fifo:
        pod.directory.alive.unlink()
    pod.directory.go()
    with pod.main(shell=shell) as main:
        assert await main.exit_code() == 0
    assert output(pod) == ["up"]
    assert pod.directory.alive.exists() == has_fifo
