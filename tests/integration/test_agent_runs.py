"""Ranks of training jobs on a node, in real sandboxes: staged, started on command, followed, stopped, and gone without a trace."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agent.mounts import unmounting
from tests.support.agent.process import Program
from tests.support.agent.runs import RunMirror, needs_bwrap, tar_of

pytestmark = needs_bwrap
RUN = "run0000001"


@pytest.fixture
def mirror() -> Iterator[RunMirror]:
    mirror = RunMirror()
    with mirror.running():
        yield mirror


@pytest.fixture
def program(mirror: RunMirror, tmp_path: Path) -> Iterator[Program]:
    given = {"BDN_AGENT_ROLES": "node,job", "BDN_AGENT_JOB_LAUNCHER": "bwrap", "BDN_AGENT_EXPOSURE": "auto"}
    with unmounting(tmp_path):
        yield Program(tmp_path / "node", mirror.url, given)


async def test_rank__staged_and_started__finds_weights_archive_and_environment(
    mirror: RunMirror, program: Program
) -> None:
    model = mirror.publish({"config.json": b"{}", "deep/weights": b"weights"})
    script = "import os, sys; print(os.environ['NAME'], os.getcwd(), open('/app/model/deep/weights').read())"
    async with program.daemon():
        mirror.place(
            RUN,
            "python3 train.py; touch /mnt/bt-scratch/file /tmp/file ~/file && echo $HOME",
            "echo second; exit 3",
            "echo third",
            weights={"/app/model": model},
            archive=tar_of({"train.py": script.encode()}),
            environment={"NAME": 'it\'s a "name" with $HOME'},
        )
        report = await mirror.ran(RUN)

    assert mirror.lines(RUN) == ['it\'s a "name" with $HOME /b10/workspace weights', "/root", "second"]
    assert (report.exit_code, report.error) == (3, None)
    assert report.bytes_done == report.bytes_total
