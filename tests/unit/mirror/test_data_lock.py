"""The lock of a data directory: one process has it, and what it says is believed only while nobody else can have a hand in it."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError
from bdn.mirror.db.data_lock import DataDirectoryInUseError, locked
from tests.support.crash.scripted_writes import failing

LOCK = "mirror.lock"
URL = "http://127.0.0.1:1"
NOBODY = 65534


def refused(data_dir: Path) -> DataDirectoryInUseError:
    with pytest.raises(DataDirectoryInUseError) as caught, locked(data_dir, "bdn pull"):
        pass
    return caught.value


def test_who_comes_second_is_told_who_has_it_and_where_that_one_answers_while_it_does(tmp_path: Path) -> None:
    with locked(tmp_path, "bdn up") as lock:
        assert [(refused(tmp_path).url, refused(tmp_path).is_passing)] == [("", True)]
        with lock.answering(URL, "off"):
            told = refused(tmp_path)
            assert (told.url, told.auth, told.is_passing) == (URL, "off", False)
            assert str(told) == f"the data directory {tmp_path} is in use by bdn up (process {os.getpid()})"
        assert (refused(tmp_path).url, refused(tmp_path).is_passing) == ("", True)
    with locked(tmp_path, "bdn pull"):
        pass


def test_what_a_killed_process_left_is_not_read(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"holder": "bdn up (process 1)", "url": URL, "auth": "off"}))
    with locked(tmp_path, "bdn serve"):
        assert refused(tmp_path).url == ""
        assert "bdn serve" in str(refused(tmp_path))


def test_it_is_for_its_owner_alone_whoever_made_it(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("bdn up (process 1)")
    (tmp_path / LOCK).chmod(0o664)
    with locked(tmp_path, "bdn serve"):
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600


SAID = json.dumps({"holder": "bdn up (process 1)", "url": URL, "auth": "off"})
UNTRUSTED: dict[str, Callable[[Path], object]] = {
    "readable": lambda lock: lock.chmod(0o644),
    "readable-by-the-group": lambda lock: lock.chmod(0o640),
    "writable": lambda lock: lock.chmod(0o602),
    "cut-off": lambda lock: lock.write_text(SAID[:-2]),
    "of-an-earlier-version": lambda lock: lock.write_text("bdn up (process 1)"),
    "of-another-form": lambda lock: lock.write_text("[1]"),
    "without-a-holder": lambda lock: lock.write_text(json.dumps({"url": URL})),
    "of-another-user": lambda lock: os.chown(lock, NOBODY, NOBODY),
}


@pytest.mark.parametrize("change", UNTRUSTED.values(), ids=UNTRUSTED)
def test_what_others_could_have_written_or_nobody_understands_leads_nowhere(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    if change is UNTRUSTED["of-another-user"] and os.geteuid() != 0:
        pytest.skip("needs root")
    lock = tmp_path / LOCK
    lock.touch(mode=0o600)
    lock.write_text(SAID)
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert refused(tmp_path).url == URL

        change(lock)

        assert (refused(tmp_path).url, refused(tmp_path).is_passing) == ("", False)


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskFailedError), locked(tmp_path / "data", "bdn up"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_data_directory__files_cannot_be_locked__is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(number))

    with pytest.raises(DiskFailedError, match="BDN_DATA_DIR") as caught, locked(tmp_path, "bdn pull"):
        pass

    assert caught.value.path == str(tmp_path)
