import os
import subprocess
import sys
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError, InUseError
from node_agent.disk.cache_directory import owned


def test_a_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with owned(tmp_path / "owner"), pytest.raises(InUseError) as caught, owned(tmp_path / "owner"):
        pass

    assert caught.value.holders == (f"process {os.getpid()}",)
    assert str(tmp_path) in str(caught.value)
    with owned(tmp_path / "owner"):
        pass


def test_an_owner_that_was_killed_owns_nothing(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from node_agent.disk.cache_directory import owned\n"
    script += "with owned(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(tmp_path / "owner")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        with pytest.raises(InUseError, match=f"process {other.pid}"), owned(tmp_path / "owner"):
            pass
        other.kill()
        other.wait()

    with owned(tmp_path / "owner"):
        pass


def test_a_directory_that_cannot_be_written_is_a_disk_failure(tmp_path: Path) -> None:
    with pytest.raises(DiskFailedError, match="absent"), owned(tmp_path / "absent/owner"):
        pass
