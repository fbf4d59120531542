"""A job that prints faster than its mirror takes, or while there is none, does not fill the disk of its node."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from tests.support.agent.mounts import unmounting
from tests.support.agent.process import Program
from tests.support.agent.runs import SCRATCH_BYTES, RunMirror, needs_bwrap
from tests.support.promises.tally import FULL
from tests.support.waiting import until

RUN: Final = "run0000001"
MOST: Final = 1024**3
LINE: Final = "step 1000 of 1000000, loss 2.345678, 1000 tokens per second"
COUNT: Final = 5 * 10**9 // len(LINE)
LAST: Final = "the last line"
LONGEST_SECONDS: Final = 1200.0


@pytest.fixture
def mirror() -> Iterator[RunMirror]:
    mirror = RunMirror()
    with mirror.running():
        yield mirror


def bytes_below(folder: Path) -> int:
    """That files occupy on the disk."""
    used = 0
    with suppress(FileNotFoundError):  # at the end, what was listed goes
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                used += path.lstat().st_blocks * 512
    return used


async def most_bytes(folder: Path, is_over: asyncio.Event) -> int:
    most = 0
    while not is_over.is_set():
        most = max(most, bytes_below(folder))
        await asyncio.sleep(0.01)  # another process: there is nothing to be notified by
    return most


@needs_bwrap
@pytest.mark.skipif(not FULL, reason="make fault: prints five gigabytes")
@pytest.mark.promise("space")
@pytest.mark.parametrize("is_away", [False, True], ids=["mirror is slower", "mirror is away"])
async def test_output_of_five_gigabytes__takes_at_most_one_of_the_disk_and_its_newest_lines_are_kept(
    mirror: RunMirror, tmp_path: Path, is_away: bool
) -> None:
    given = {"BDN_AGENT_ROLES": "node,job", "BDN_AGENT_JOB_LAUNCHER": "bwrap", "BDN_AGENT_EXPOSURE": "auto"}
    program = Program(tmp_path / "node", mirror.url, given | {"BDN_AGENT_SCRATCH_BYTES": str(SCRATCH_BYTES)})
    has_printed = program.root / "runs" / f"{RUN}-0" / "shared" / "exit_code"
    is_over = asyncio.Event()
    with unmounting(tmp_path):
        async with program.daemon(), asyncio.TaskGroup() as group:
            mirror.place(RUN, f"yes '{LINE}' | head -n {COUNT}; echo '{LAST}'")
            await mirror.reached(RUN, "STAGED")
            mirror.want(RUN, "go")
            measured = group.create_task(most_bytes(program.root / "runs", is_over))
            await mirror.reached(RUN, "RUNNING")
            mirror.down = is_away
            await until(lambda: not is_away or has_printed.exists(), "the end of the commands", seconds=LONGEST_SECONDS)
            mirror.down = False
            await until(lambda: state_of(mirror) == "ENDED", "the end of the rank", seconds=LONGEST_SECONDS)
            is_over.set()

    assert measured.result() <= MOST
    *lines, last = mirror.lines(RUN)
    assert (set(lines), last) == ({LINE}, LAST)
    notes = [text for batch in mirror.batches[RUN].values() for _, text in batch if text.startswith("bdn: at least")]
    dropped = sum(int(note.split()[3]) for note in notes)
    assert dropped > 0
    assert len(lines) + dropped == COUNT


def state_of(mirror: RunMirror) -> str | None:
    report = mirror.report(RUN)
    return None if report is None else report.state
