"""A rank's process is started once and found again; an engine that does not answer has not lost its containers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.run.directory import RunDirectory
from node_agent.run.processes import EngineContainer, Sandbox, launch
from tests.support.waiting import until

NAME = "bdn-run0000001-0"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run0000001-0")
    made.shared.mkdir(parents=True)
    return made


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no rank's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def test_launch__twice__starts_one_process_that_another_agent_finds_and_ends(directory: RunDirectory) -> None:
    for name in ("first", "second"):
        launch(directory, ["sh", "-c", f"echo {name} >>{directory.shared}/started; exec sleep 600"])
    await until((directory.shared / "started").exists)
    await until(directory.stderr.read_bytes, "the second has failed")
    found = Sandbox(directory)
    assert found.is_alive()
    found.remove()

    assert not Sandbox(directory).is_alive()
    assert (directory.shared / "started").read_text() == "first\n"


def test_process__with_the_id_of_an_ended_rank__is_not_taken_for_it(
    directory: RunDirectory, stranger: subprocess.Popen[bytes]
) -> None:
    directory.pid.write_text(f"{stranger.pid} 1\n")  # another start time
    assert not Sandbox(directory).is_alive()
    Sandbox(directory).remove()

    assert stranger.poll() is None


def test_signal__to_a_process_that_is_not_the_sandbox_s_child__is_not_sent(
    directory: RunDirectory, stranger: subprocess.Popen[bytes]
) -> None:
    launch(directory, ["sleep", "600"])
    directory.info.write_text(f'{{"child-pid": {stranger.pid}}}')
    sandbox = Sandbox(directory)
    sandbox.signal(signal.SIGTERM)
    sandbox.remove()

    assert not sandbox.is_alive()
    assert stranger.poll() is None


def engine(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, answer: str) -> EngineContainer:
    """A podman that answers so, and notes what it was called with."""
    program = directory.path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >>{directory.path}/calls\n{answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return EngineContainer(directory, "podman", NAME)


@pytest.mark.parametrize(("answer", "is_alive"), [
    ("echo true", True),
    ("echo false", False),
    ("echo 'Error: no such container' >&2; exit 125", False),
    ("echo 'Error response from daemon: No such container: x' >&2; exit 1", False),
    ("echo 'cannot connect to the daemon' >&2; exit 1", True),
])  # fmt: skip
def test_container__by_its_name__is_alive_unless_the_engine_says_otherwise(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, answer: str, is_alive: bool
) -> None:
    assert engine(directory, monkeypatch, answer).is_alive() == is_alive


@pytest.mark.parametrize(("answer", "code"), [("echo 3", 3), ("echo 137", 137), ("echo 0", 137), ("exit 1", 137)])
def test_container__that_left_no_exit_code__has_the_engine_s_or_was_killed(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    assert engine(directory, monkeypatch, answer).exit_code() == code


async def test_container__while_the_engine_pulls__is_alive_and_removed_with_the_pull(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = engine(directory, monkeypatch, "echo false")
    launch(directory, ["sleep", "600"])
    assert container.is_alive()
    container.signal(signal.SIGTERM)
    assert container.is_alive()
    container.remove()

    await until(lambda: not Sandbox(directory).is_alive())
    calls = (directory.path / "calls").read_text().splitlines()
    assert calls == [f"kill --signal TERM {NAME}", f"kill --signal KILL {NAME}", f"rm --force {NAME}"]
