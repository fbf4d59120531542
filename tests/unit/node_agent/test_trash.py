"""What is thrown away is gone at once, and deleted whatever a job made of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.disk.trash import Trash
from tests.support.services.commands import wait_until


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def test_what_is_discarded_is_gone_from_its_name_and_soon_deleted(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/file").write_bytes(b"x")
    file.write_bytes(b"y")
    with Trash(tmp_path / "trash") as trash:
        for path in (folder, file, tmp_path / "absent"):
            trash.discard(path)
            assert not path.exists()
        wait_until(lambda: _is_empty(trash.folder))


def test_no_link_is_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    folder.mkdir()
    (folder / "to-folder").symlink_to(outside)
    (folder / "to-file").symlink_to(outside / "kept")
    os.mkfifo(folder / "fifo")
    with Trash(tmp_path / "trash") as trash:
        trash.discard(folder)
        wait_until(lambda: _is_empty(trash.folder))
    assert (outside / "kept").read_bytes() == b"x"


def test_a_tree_deeper_than_any_path_is_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # 5 bytes each: far beyond PATH_MAX, and beyond what descriptors or a stack would allow
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with Trash(tmp_path / "trash") as trash:
        trash.discard(top)
        wait_until(lambda: _is_empty(trash.folder))


def test_folders_without_any_right_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "folder/closed/inner").mkdir(parents=True)
    (tmp_path / "folder/closed/inner").chmod(0)
    (tmp_path / "folder/closed").chmod(0)
    with Trash(tmp_path / "trash") as trash:
        trash.discard(tmp_path / "folder")
        wait_until(lambda: _is_empty(trash.folder))


def test_what_a_killed_run_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(20_000):
        (folder / str(number)).touch()
    code = (
        "import sys, time; from pathlib import Path; from node_agent.disk.trash import Trash\n"
        f"with Trash(Path({str(tmp_path / 'trash')!r})) as trash:\n"
        f"    trash.discard(Path({str(folder)!r})); print('gone', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"gone\n"
        process.send_signal(signal.SIGKILL)
    assert not folder.exists()
    with Trash(tmp_path / "trash") as trash:
        wait_until(lambda: _is_empty(trash.folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to write an attribute that root respects")
def test_what_cannot_be_deleted_holds_up_nothing_else(tmp_path: Path) -> None:
    stuck, other = tmp_path / "stuck", tmp_path / "other"
    stuck.mkdir()
    other.mkdir()
    (stuck / "file").touch()
    if subprocess.run(["chattr", "+i", str(stuck / "file")], check=False, capture_output=True).returncode:
        pytest.skip("this file system has no attribute that forbids deleting")
    with Trash(tmp_path / "trash") as trash:
        trash.discard(stuck)
        trash.discard(other)
        try:
            wait_until(lambda: len(list(trash.folder.iterdir())) == 1)
        finally:
            subprocess.run(["chattr", "-R", "-i", str(trash.folder)], check=True)
        trash.discard(tmp_path / "absent")  # whatever wakes it makes it try again
        wait_until(lambda: _is_empty(trash.folder))
