"""Directories that a job writes: watched whatever it makes of them, or images that leave nothing when they are closed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.wire.job_schema import LEAST_BYTES
from node_agent.job.bounds import BoundedFolder
from tests.support.agent.mounts import needs_images, unmounting

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Nobody's, below folders that nobody may pass."""
    folder = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    for path in (folder, *folder.iterdir()):
        path.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize("closed", ["inside", "."])
@pytest.mark.parametrize("mode", [0o400, 0o000])
def test_what_cannot_be_counted_is_too_much(folder: Path, closed: str, mode: int) -> None:
    """The agent has the job's own user, or another one who is not root."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            (folder / "inside").mkdir()
            (folder / "inside/file").write_bytes(b"x")
            (folder / closed).chmod(mode)
            bounded = BoundedFolder(folder, LEAST_BYTES, "watch", is_kept=False)
            bounded.look()
            status = int(not bounded.is_exceeded)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def devices_of(image: Path) -> list[str]:
    return run("losetup", "--noheadings", "--output", "NAME", "--associated", image).split()


@needs_images
@pytest.mark.parametrize("is_mounted", [False, True], ids=["before it mounted the image", "after"])
def test_loop_device_of_an_agent_that_was_killed__goes_with_the_folder(tmp_path: Path, is_mounted: bool) -> None:
    folder = BoundedFolder(tmp_path / "scratch", LEAST_BYTES, "image", is_kept=False)
    with unmounting(tmp_path):
        folder.open()
        (folder.place / "file").write_bytes(b"x")
        for is_opened_again in (True, False):
            run("umount", folder.place)
            device = run("losetup", "--find", "--show", folder.image).strip()
            if is_mounted:
                run("mount", device, folder.place)
            if is_opened_again:
                folder.open()
                assert (folder.place / "file").read_bytes() == b"x"
        folder.close()
        assert devices_of(folder.image) == []
        assert not list(folder.place.iterdir())
