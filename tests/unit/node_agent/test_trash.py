"""What is discarded is gone under its name at once and for good, whatever a job made of it; only that is deleted, and what was left is deleted next time."""

import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bdn.core.errors import DiskFailedError
from node_agent.disk.trash import Trash
from tests.support.crash.killed_disk import Killed, MortalDisk
from tests.support.services.commands import wait_until


@pytest.fixture(name="trash")
def a_trash(tmp_path: Path) -> Trash:
    """Nothing runs in the background."""
    return Trash(tmp_path / ".trash")


def tree(root: Path, folders: int = 3, files: int = 4) -> Path:
    for number in range(folders):
        (root / f"folder-{number}").mkdir(parents=True)
        for name in range(files):
            (root / f"folder-{number}/{name}").write_bytes(b"content")
    return root


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / ".trash").iterdir())


def test_what_is_discarded_is_gone_under_its_name_and_deleted_later(tmp_path: Path, trash: Trash) -> None:
    volume = tree(tmp_path / "volume")

    assert trash.discard(volume)

    assert not volume.exists()
    [name] = left(tmp_path)
    assert len(list((tmp_path / ".trash" / name).rglob("*"))) == 15  # whole, as it was
    trash.sweep()
    assert left(tmp_path) == []
    assert (tmp_path / ".trash").stat().st_mode & 0o777 == 0o700


def test_what_is_not_there_is_not_discarded(tmp_path: Path, trash: Trash) -> None:
    trash.sweep()
    assert not trash.discard(tmp_path / "absent")
    assert not trash.discard(tmp_path / "absent/below")


def test_the_thread_deletes_what_an_earlier_run_left_and_what_comes(tmp_path: Path) -> None:
    Trash(tmp_path / ".trash").discard(tree(tmp_path / "earlier"))

    with Trash(tmp_path / ".trash") as trash:
        wait_until(lambda: not left(tmp_path))
        trash.discard(tree(tmp_path / "later", folders=20, files=50))
        wait_until(lambda: not left(tmp_path))


def test_a_trash_that_is_left_stops_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trash(tmp_path / ".trash").discard(tree(tmp_path / "volume"))
    is_begun, may_go_on = threading.Event(), threading.Event()
    real = os.unlink

    def waiting(path: str, **options: int) -> None:
        is_begun.set()
        assert may_go_on.wait(60)
        real(path, **options)

    monkeypatch.setattr(os, "unlink", waiting)
    with Trash(tmp_path / ".trash") as trash:
        assert is_begun.wait(60)  # and whoever discards meanwhile is not held up
        trash.discard(tree(tmp_path / "other"))
        trash._stop.set()
        may_go_on.set()

    assert len([path for path in (tmp_path / ".trash").rglob("*") if path.is_file()]) == 23  # of twice 12


def test_the_input_and_output_of_the_thread_wait_for_all_others(tmp_path: Path) -> None:
    if shutil.which("ionice") is None:
        pytest.skip("nothing here tells the priority")

    with Trash(tmp_path / ".trash") as trash:
        command = ["ionice", "-p", str(trash._thread.native_id)]
        wait_until(lambda: subprocess.run(command, check=True, capture_output=True).stdout == b"idle\n")


def test_no_link_is_followed(tmp_path: Path, trash: Trash) -> None:
    outside = tree(tmp_path / "outside")
    volume = tree(tmp_path / "volume")
    (volume / "link").symlink_to(outside)
    (volume / "folder-0/link").symlink_to(outside / "folder-0")
    (tmp_path / "name").symlink_to(outside)

    assert trash.discard(volume)
    assert trash.discard(tmp_path / "name")
    trash.sweep()

    assert left(tmp_path) == []
    assert len(list(outside.rglob("*"))) == 15


def test_a_folder_that_becomes_a_link_while_it_is_deleted_leads_nowhere(
    tmp_path: Path, trash: Trash, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tree(tmp_path / "outside")
    trash.discard(tree(tmp_path / "volume", folders=1))
    [name] = left(tmp_path)
    folder = tmp_path / ".trash" / name / "folder-0"
    real = os.open

    def swapping(path: object, *given: object, **options: object) -> int:
        if path == "folder-0" and not folder.is_symlink():
            folder.rename(tmp_path / "kept")
            folder.symlink_to(outside)
        return real(path, *given, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", swapping)
        trash.sweep()

    assert len(list(outside.rglob("*"))) == 15
    trash.sweep()
    assert left(tmp_path) == []


def test_what_lies_deeper_than_descriptors_reach_is_deleted(tmp_path: Path, trash: Trash) -> None:
    (tmp_path / "volume").mkdir()
    folder = os.open(tmp_path / "volume", os.O_RDONLY)
    for _ in range(300):
        os.mkdir("a-longer-folder", dir_fd=folder)  # together longer than any path
        below = os.open("a-longer-folder", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        trash.discard(tmp_path / "volume")
        trash.sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert left(tmp_path) == []


SWEEP = """
import os, sys
from pathlib import Path
from node_agent.disk.trash import Trash
os.setuid(65534)
trash = Trash(Path(sys.argv[1]) / ".trash")
assert trash.discard(Path(sys.argv[1]) / "volume")
trash.sweep()
"""


def test_a_user_who_is_not_root_deletes_what_its_modes_forbid() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes what is another user's")
    with TemporaryDirectory(dir="/tmp") as name:
        shared = Path(name)
        volume = tree(shared / "volume")
        for path in [shared, *shared.rglob("*")]:
            os.chown(path, 65534, 65534)
        for path in (volume / "folder-0", volume / "folder-1/0", volume):
            path.chmod(0)

        subprocess.run([sys.executable, "-c", SWEEP, name], check=True, cwd=Path(__file__).parents[3])

        assert [path.name for path in shared.rglob("*")] == [".trash"]


def test_what_cannot_be_deleted_stays_and_the_rest_goes(
    tmp_path: Path, trash: Trash, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trash.discard(tree(tmp_path / "volume", folders=1))
    [name] = left(tmp_path)
    real = os.unlink

    def refusing(path: str, **options: int) -> None:
        if path == "2":
            raise PermissionError(1, "Operation not permitted", path)
        real(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refusing)
        trash.sweep()
        trash.sweep()

    assert [path.name for path in (tmp_path / ".trash" / name / "folder-0").iterdir()] == ["2"]
    assert [record.getMessage().count("not permitted") for record in caplog.records] == [1]  # and not each minute
    trash.sweep()
    assert left(tmp_path) == []


def test_what_lies_on_another_file_system_stays_where_it_is(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    volume = tree(tmp_path / "volume")
    trash = Trash(memory / f"trash-{os.getpid()}")
    try:
        with pytest.raises(DiskFailedError, match="cross-device"):
            trash.discard(volume)
        assert len(list(volume.rglob("*"))) == 15
    finally:
        (memory / f"trash-{os.getpid()}").rmdir()


def test_a_kill_at_any_step_leaves_a_directory_whole_or_gone_and_the_next_run_ends_it(tmp_path: Path) -> None:
    step = 0
    while True:
        step += 1
        root = tmp_path / str(step)
        volume = tree(root / "volume", folders=2, files=2)
        disk = MortalDisk(seed=step)
        disk.die_at(step)
        try:
            with disk.mounted():
                trash = Trash(root / ".trash")
                trash.discard(volume)
                trash.sweep()
        except Killed:
            pass

        if volume.exists():
            assert len(list(volume.rglob("*"))) == 6, disk.last
        again = Trash(root / ".trash")
        again.discard(volume)
        again.sweep()
        assert not volume.exists()
        assert left(root) == []
        if not disk.is_dead:
            break
    assert step > 10
