"""What a job may have in a directory that is watched, whatever it makes of it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.wire.job_schema import LEAST_BYTES
from node_agent.job.bounds import BoundedFolder

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
