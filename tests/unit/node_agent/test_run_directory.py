"""What a job may put beside the output of its rank."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.errors import ScratchFullError
from node_agent.run.directory import RunDirectory

MIB = 1024**2


def write_output(shared: Path) -> None:
    (shared / "output").write_bytes(3 * MIB * b"x")


def write_file(shared: Path) -> None:
    (shared / "deep/er").mkdir(parents=True)
    (shared / "deep/er/file").write_bytes(2 * MIB * b"x")


def write_link(shared: Path) -> None:
    (shared.parent / "large").write_bytes(2 * MIB * b"x")
    (shared / "link").symlink_to(shared.parent / "large")


def make_many(shared: Path) -> None:
    for number in range(101):
        (shared / f"empty-{number}").touch()


def nest_too_deep(shared: Path) -> None:
    (shared / "/".join(300 * "d")).mkdir(parents=True)


@pytest.mark.parametrize(("make", "is_refused"), [
    (write_output, False),
    (write_link, False),
    (write_file, True),
    (make_many, True),
    (nest_too_deep, True),
])  # fmt: skip
def test_run_directory__beyond_its_bound__is_scratch_full(
    tmp_path: Path, make: Callable[[Path], None], is_refused: bool
) -> None:
    directory = RunDirectory(tmp_path / "run0000001-0")
    directory.shared.mkdir(parents=True)
    make(directory.shared)
    if is_refused:
        with pytest.raises(ScratchFullError):
            directory.check_size(MIB, 100)
    else:
        directory.check_size(MIB, 100)
