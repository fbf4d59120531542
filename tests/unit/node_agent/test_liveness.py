"""The FIFO by which another container learns that the last process of a rank has ended."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError
from node_agent.run.directory import RunDirectory
from node_agent.run.liveness import Liveness, make_alive


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """As ``prepare`` leaves it."""
    directory = RunDirectory(tmp_path)
    directory.shared.mkdir()
    directory.env.touch()
    make_alive(directory.alive)
    make_alive(directory.alive)
    return directory


@contextmanager
def process(directory: RunDirectory) -> Iterator[int]:
    """As ``start.sh`` opens it, whether there is a reader or not."""
    descriptor = os.open(directory.alive, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_rank__begins_and_ends__is_awaited_alive_and_ended(directory: RunDirectory) -> None:
    with Liveness(directory) as life:
        assert [life.look(), life.look()] == ["AWAITED", "AWAITED"]
        with process(directory):
            assert life.look() == "ALIVE"
            directory.env.unlink()
            with process(directory):
                assert life.look() == "ALIVE"
            assert life.look() == "ALIVE"
        assert [life.look(), life.look()] == ["ENDED", "ENDED"]


def test_rank__began_and_ended_before_anyone_looked__is_ended(directory: RunDirectory) -> None:
    with process(directory):
        directory.env.unlink()
    with Liveness(directory) as life:
        assert life.look() == "ENDED"


def test_rank__alive_before_its_reader_came__is_alive_and_then_ended(directory: RunDirectory) -> None:
    with process(directory):
        life = Liveness(directory)
        assert life.look() == "ALIVE"
    with life:
        assert life.look() == "ENDED"


def test_rank__killed_between_two_looks_and_before_it_read_its_environment__is_ended(directory: RunDirectory) -> None:
    with Liveness(directory) as life:
        assert life.look() == "AWAITED"
        with process(directory):
            pass
        assert life.look() == "ENDED"


def test_job__that_writes_into_the_fifo__is_alive_until_its_end(directory: RunDirectory) -> None:
    with Liveness(directory) as life:
        with process(directory) as descriptor:
            for _ in range(3):
                os.write(descriptor, b"x" * 5000)
                assert life.look() == "ALIVE"
        assert life.look() == "ENDED"


@pytest.mark.parametrize("kind", ["file", "link", "nothing"])
def test_job__that_replaced_the_fifo__is_an_error_with_its_path(directory: RunDirectory, kind: str) -> None:
    directory.alive.unlink()
    if kind == "file":
        directory.alive.touch()
    elif kind == "link":
        os.mkfifo(directory.shared / "other")
        directory.alive.symlink_to("other")
    with pytest.raises(DiskFailedError, match=str(directory.alive)):
        Liveness(directory)
