import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from bdn.core.errors import DiskFailedError, InvalidRequestError
from node_agent.stage.view import build as module
from node_agent.stage.view.destination import Destination, Earlier, resolved
from tests.support.agent.destination import NEW, OLD, STAMP, Site
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts, read_only
from tests.support.content.trees import tree
from tests.support.crash.scripted_writes import failing


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.at(tmp_path)


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user without rights, as far as files go."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_view_appears_where_nothing_was(site: Site, is_there: bool) -> None:
    if is_there:  # an empty directory is as good as none
        site.path.mkdir(parents=True)
    earlier = site.publish(site.old)

    assert tree(site.path) == OLD
    assert site.path.stat().st_ino == earlier.inode
    assert names(site.path.parent) == ["model"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_earlier_view_of_ours_is_replaced_in_one_step_or_two(
    site: Site, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    earlier = site.publish(site.old)

    if not can_exchange:
        monkeypatch.setattr(module, "exchange", failing(errno.EINVAL))
    site.publish(site.new, earlier)

    assert tree(site.path) == NEW
    assert names(site.path.parent) == ["model"]


def test_a_damaged_view_of_ours_is_mended(site: Site) -> None:
    earlier = site.publish(site.old)
    (site.path / "a/old").unlink()

    site.publish(site.old, earlier)

    assert tree(site.path) == OLD


@pytest.mark.parametrize("is_mounted", [False, pytest.param(True, marks=needs_mounts)])
def test_a_directory_of_the_users_is_refused_by_name_and_stays(site: Site, is_mounted: bool) -> None:
    site.path.mkdir(parents=True)
    with mounted_tmpfs(site.path, "1m") if is_mounted else nullcontext():
        (site.path / "mine").write_bytes(b"mine")

        for action in (site.check, lambda: site.publish(site.old)):
            with pytest.raises(InvalidRequestError, match=f"{site.path}: it is not empty"):
                action()

        assert tree(site.path) == {"mine": b"mine"}
        assert names(site.path.parent) == ["model"]


@pytest.mark.parametrize("name", ["notes.txt", "a/old", "a/deeper/notes"])
def test_a_view_into_which_the_user_wrote_is_not_replaced(site: Site, name: str) -> None:
    earlier = site.publish(site.old)
    path = site.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(b"the user's own")

    with pytest.raises(InvalidRequestError, match=f"'{name}', which did not come from bdn or was changed"):
        site.publish(site.new, earlier)

    assert path.read_bytes() == b"the user's own"


def test_another_directory_at_the_same_path_is_not_ours(site: Site) -> None:
    earlier = site.publish(site.old)
    site.path.rename(site.path.with_name("moved"))
    site.path.mkdir()
    (site.path / "config.json").write_bytes(b"{}")

    with pytest.raises(InvalidRequestError, match="it is not empty"):
        site.check(earlier)


def test_an_earlier_view_whose_manifest_is_unknown_is_not_replaced(site: Site) -> None:
    earlier = site.publish(site.old)

    unknown = Earlier(earlier.inode, site.old.digest, None, STAMP)
    site.check(unknown)  # it may be the one that comes
    with pytest.raises(InvalidRequestError, match="no longer knows"):
        site.publish(site.new, unknown)
    site.publish(site.old, unknown)

    assert tree(site.path) == OLD


def touch(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")


def make_fifo(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def stand_in(path: Path) -> None:
    path.mkdir(parents=True)
    os.chdir(path)


@pytest.mark.parametrize(("happens", "reason"), [
    (lambda site: touch(site.path), "it is a file"),
    (lambda site: touch(site.path.parent), "a part of the path is a file"),
    (lambda site: stand_in(site.path), "name a directory below it"),
    (lambda site: stand_in(site.path / "below"), "name a directory below it"),
    (lambda site: setattr(site, "path", site.files.places.root / "x"), "it is in the cache directory"),
    (lambda site: setattr(site, "path", Path("/")), "name a directory below it"),
    (lambda site: setattr(site, "path", Path("/dev")), "it is not empty"),
    (lambda site: setattr(site, "path", Path("/dev/null")), "it is not a directory"),
    (lambda site: setattr(site, "path", Path("/dev/null/x")), "a part of the path is a file"),
    (lambda site: setattr(site, "path", site.path.parent / ("n" * 300)), "a name in it is too long"),
    (lambda site: setattr(site, "path", site.path.parent.joinpath(*["n" * 200] * 25)), "a name in it is too long"),
    (lambda site: make_fifo(site.path), "it is not a directory"),
], ids=[
    "file", "below a file", "here", "above here", "cache", "root", "devices", "device", "below a device", "long name",
    "long path", "fifo",
])  # fmt: skip
def test_a_path_where_no_view_can_be_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Site], object], reason: str
) -> None:
    monkeypatch.chdir(site.files.places.root)  # and back, in the end
    happens(site)

    for action in (site.check, lambda: site.publish(site.old)):
        with pytest.raises(InvalidRequestError, match=reason):
            action()


def test_destination__file_system_makes_no_directories__is_refused(site: Site) -> None:
    site.path = Path("/proc/model")

    with pytest.raises(InvalidRequestError, match="you may not write there"):
        site.check()


def test_destination__links_lead_in_a_circle__is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(InvalidRequestError, match="its symbolic links form a loop"):
        resolved(tmp_path / "loop/model")


@needs_mounts
def test_destination__file_system_is_read_only__is_refused(site: Site) -> None:
    site.path.parent.mkdir()
    with read_only(site.path.parent), pytest.raises(InvalidRequestError, match="its file system is read-only"):
        site.check()


@pytest.mark.parametrize(
    "name",
    [
        "dangling",
        "dangling/deeper",
        "link",
        "new/",
        "a\nb",
        os.fsdecode(b"\xff"),
        "n" * 255,
        "/".join(["n" * 200] * 15),
    ],
)
def test_destination__unusual_and_possible__is_filled(site: Site, name: str) -> None:
    folder = site.path.parent
    (folder / "empty").mkdir(parents=True)
    (folder / "link").symlink_to("empty")
    (folder / "dangling").symlink_to("absent")
    site.path = resolved(folder / name)

    site.check()
    site.publish(site.old)

    assert tree(folder / name) == OLD


def test_destination__of_a_directory_that_another_user_closed__is_refused(site: Site) -> None:
    site.path.parent.mkdir(mode=0o700)

    with as_nobody(), pytest.raises(InvalidRequestError, match="you may not write there"):
        site.check()


def test_a_failure_leaves_nothing_behind(site: Site) -> None:
    site.files.places.file(site.old.files[0].digest).unlink()

    with pytest.raises(DiskFailedError):
        site.publish(site.old)

    assert names(site.path.parent) == []


@needs_mounts
def test_mount_point_as_destination__is_filled_updated_and_mended(site: Site) -> None:
    with mounted_tmpfs(site.path, "1m"):
        (site.path / "lost+found").mkdir()  # as mkfs.ext4 makes it
        inode = site.path.stat().st_ino

        earlier = site.publish(site.old)

        assert tree(site.path) == OLD
        assert earlier.inode == inode
        assert names(site.path.parent) == ["model"]
        assert sorted(names(site.path)) == ["a", "config.json", "lost+found"]
        assert {path.stat().st_mode & 0o777 for path in site.path.rglob("*") if path.is_file()} == {0o444}

        later = site.publish(site.new, earlier)
        assert tree(site.path) == NEW

        (site.path / "a/new").unlink()
        site.publish(site.new, later)
        assert tree(site.path) == NEW


def test_replacement__no_exchange_and_the_second_rename_fails__the_earlier_view_is_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = site.publish(site.old)
    monkeypatch.setattr(module, "exchange", failing(errno.EPERM))
    real, is_moved = Path.rename, threading.Event()

    def rename(path: Path, target: Path) -> Path:
        if is_moved.is_set() and path.name.endswith(".bdn-stg_x"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if path == site.path:
            is_moved.set()
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DiskFailedError):
        site.publish(site.new, earlier)

    assert is_moved.is_set()
    assert tree(site.path) == OLD
    assert names(site.path.parent) == ["model"]


def test_replacement__no_exchange_and_somebody_has_the_place__their_files_stay(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = site.publish(site.old)
    monkeypatch.setattr(module, "exchange", failing(errno.EPERM))
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        renamed = real(path, target)
        if path == site.path:
            path.mkdir()
            (path / "mine").write_bytes(b"mine")
        return renamed

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(InvalidRequestError, match="it is not empty"):
        site.publish(site.new, earlier)

    assert tree(site.path) == {"mine": b"mine"}


def test_replacement__killed_while_nothing_stands_there__the_next_clearing_puts_the_earlier_view_back(
    site: Site,
) -> None:
    site.publish(site.old)
    destination = Destination(site.path, "stg_x", site.files, STAMP)
    site.path.rename(module.replaced(destination.aside))

    destination.clear()

    assert tree(site.path) == OLD
    assert names(site.path.parent) == ["model"]
