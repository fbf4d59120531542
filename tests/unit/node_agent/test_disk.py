import errno
import fcntl
import os
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError, InUseError
from bdn.disk.durable import disk_errors, make_folder, remove_empty, write_at_once, write_durably
from node_agent.disk.cache_directory import owned
from node_agent.disk.places import Places
from tests.support.crash.scripted_writes import failing


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, b"new")

    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_that_need_not_survive_a_power_cut_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", pytest.fail)
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        write_at_once(path, content)

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_folders_have_their_mode_whatever_the_umask_and_existing_ones_keep_theirs(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir(mode=0o750)
    before = os.umask(0o077)
    try:
        make_folder(tmp_path / "operators/one/two", 0o755)
    finally:
        os.umask(before)

    modes = [
        path.stat().st_mode & 0o777 for path in sorted([tmp_path / "operators", *(tmp_path / "operators").rglob("*")])
    ]
    assert modes == [0o750, 0o755, 0o755]


def test_content_is_private_to_the_agent_and_views_can_be_passed_but_not_listed(tmp_path: Path) -> None:
    places = Places(tmp_path / "cache")
    places.make()

    modes = {path.name: path.stat().st_mode & 0o777 for path in places.root.iterdir()}
    assert modes == {
        "files": 0o700, "filling": 0o700, "manifests": 0o700, "stages": 0o700, "quarantine": 0o700, "views": 0o711,
        "mounts": 0o711,
    }  # fmt: skip


def test_empty_folders_are_removed_up_to_the_first_that_is_needed(tmp_path: Path) -> None:
    (tmp_path / "stop/a/b/c").mkdir(parents=True)
    (tmp_path / "stop/a/needed").write_bytes(b"")

    remove_empty(tmp_path / "stop/a/b/c", tmp_path / "stop")
    remove_empty(tmp_path / "elsewhere", tmp_path / "stop")

    assert sorted(path.name for path in (tmp_path / "stop").rglob("*")) == ["a", "needed"]


def test_an_error_of_the_disk_names_the_path_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DiskFailedError) as caught, disk_errors(tmp_path):
        (tmp_path / "absent").read_bytes()

    facts = {"path": str(tmp_path / "absent"), "reason": "No such file or directory"}
    assert caught.value.details() == facts | {"is_full": False, "others_bytes": None}


def test_a_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with owned(tmp_path / "owner"), pytest.raises(InUseError) as caught, owned(tmp_path / "owner"):
        pass

    assert caught.value.holders == (f"process {os.getpid()}",)
    assert str(tmp_path) in str(caught.value)
    with owned(tmp_path / "owner"):
        pass


@pytest.mark.parametrize(
    "left", [f'{{"pid": {os.getppid()}}}', "", "\0{"], ids=["a living process", "nothing", "rubbish"]
)
def test_what_a_killed_owner_left_keeps_no_other_out(tmp_path: Path, left: str) -> None:
    """The kernel may have given its number to another program."""
    (tmp_path / "owner").write_text(left)
    with owned(tmp_path / "owner"):
        assert str(os.getpid()) in (tmp_path / "owner").read_text()


def test_a_directory_that_cannot_be_written_is_a_disk_failure(tmp_path: Path) -> None:
    with pytest.raises(DiskFailedError, match="absent"), owned(tmp_path / "absent/owner"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_cache_directory__files_cannot_be_locked__is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))

    with pytest.raises(DiskFailedError, match="BDN_AGENT_CACHE_DIR") as caught, owned(tmp_path / "owner"):
        pass

    assert caught.value.path == str(tmp_path)


def test_cache_directory__proc_is_hidden__is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", failing(errno.ENOENT))

    with pytest.raises(DiskFailedError, match=r"boot_id.* mount proc"), owned(tmp_path / "owner"):
        pass
