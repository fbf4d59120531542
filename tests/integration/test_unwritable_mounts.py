"""Mounts through which not even root writes, where a container runtime makes its copy of them writable."""

import subprocess
from pathlib import Path

import pytest

from bdn.core.errors import NotSupportedError
from bdn.disk.binding import bind_unwritable, unbind
from node_agent.csi.target import Target
from tests.support.agent.mounts import mounted, needs_mounts, unmounting

pytestmark = needs_mounts


@pytest.fixture
def view(tmp_path: Path) -> Path:
    folder = tmp_path / "view"
    folder.mkdir()
    (folder / "weights").write_bytes(b"right")
    return folder


def test_mount__that_is_remounted_writable__lets_root_change_nothing(view: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with unmounting(tmp_path):
        bind_unwritable(view, place)
        subprocess.run(["mount", "-o", "remount,bind,rw", place], check=True)
        for change in (
            lambda: (place / "weights").write_bytes(b"wrong"),
            lambda: (place / "weights").chmod(0o777),
            (place / "weights").unlink,
            (place / "new").touch,
            lambda: place.chmod(0o777),
        ):
            with pytest.raises(OSError, match=r"Permission denied|Value too large"):
                change()
        assert (place / "weights").read_bytes() == b"right"


def test_mount__is_made_once_and_removed_as_others(view: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with unmounting(tmp_path):
        for _ in range(2):
            bind_unwritable(view, place)
        unbind(place)
        assert list(place.iterdir()) == []


def test_file_system__that_cannot_have_such_mounts__is_refused_with_the_remedy(tmp_path: Path) -> None:
    target = Target(tmp_path, "uid", "volume")
    target.path.parent.mkdir(parents=True)
    with unmounting(tmp_path / "pods"), mounted(tmp_path / "ramfs", "-t", "ramfs", "none") as view:
        with pytest.raises(NotSupportedError, match="readOnly: true"):
            target.show(view, is_read_only=False)
        target.show(view, is_read_only=True)
        target.clear()
