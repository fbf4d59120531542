import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bdn.core.chunk import Manifest
from bdn.core.errors import DiskFailedError, InvalidRequestError
from node_agent.disk.whole_files import WholeFiles
from node_agent.stage.view import build as module
from node_agent.stage.view.destination import Destination, Earlier
from tests.support.agent.cache import cached, put, whole_files
from tests.support.agent.mounts import mounted_tmpfs, needs_mounts
from tests.support.content.trees import tree
from tests.support.crash.scripted_writes import failing

OLD, NEW = {"config.json": b"{}", "a/old": b"old"}, {"config.json": b"{}", "a/new": b"new"}

STAMP = 1_700_000_000_123_456_789


@dataclass
class Site:
    """A cache that holds two trees, and a place to publish them."""

    files: WholeFiles
    old: Manifest
    new: Manifest
    path: Path

    def publish(self, manifest: Manifest, earlier: Earlier | None = None) -> Earlier:
        destination = Destination(self.path, "stg_x", self.files, STAMP)
        try:
            builder = destination.build(manifest, earlier, threading.Event())
            _, inode = destination.publish(builder, manifest, earlier)
        finally:
            destination.clear()
        return Earlier(inode, manifest.digest, manifest, STAMP)

    def check(self, earlier: Earlier | None = None) -> None:
        Destination(self.path, "stg_x", self.files, STAMP).check(earlier)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    places, old = cached(tmp_path / "cache", OLD)
    new = put(places, NEW)
    return Site(whole_files(places), old, new, tmp_path / "here/model")


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


def test_a_directory_of_the_users_is_refused_by_name_and_stays(site: Site) -> None:
    site.path.mkdir(parents=True)
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
    with pytest.raises(InvalidRequestError, match="not known any more"):
        site.publish(site.new, unknown)
    site.publish(site.old, unknown)

    assert tree(site.path) == OLD


def touch(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")


def stand_in(path: Path) -> None:
    path.mkdir(parents=True)
    os.chdir(path)


@pytest.mark.parametrize(("happens", "reason"), [
    (lambda site: touch(site.path), "it is a file"),
    (lambda site: touch(site.path.parent), "a part of the path is a file"),
    (lambda site: stand_in(site.path), "name a directory below it"),
    (lambda site: stand_in(site.path / "below"), "name a directory below it"),
    (lambda site: setattr(site, "path", site.files.places.root / "x"), "it lies in the cache directory"),
], ids=["file", "below a file", "here", "above here", "cache"])  # fmt: skip
def test_a_path_where_no_view_can_be_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Site], object], reason: str
) -> None:
    monkeypatch.chdir(site.files.places.root)  # and back, in the end
    happens(site)

    for action in (site.check, lambda: site.publish(site.old)):
        with pytest.raises(InvalidRequestError, match=reason):
            action()


def test_a_failure_leaves_nothing_behind(site: Site) -> None:
    site.files.places.file(site.old.files[0].digest).unlink()

    with pytest.raises(DiskFailedError):
        site.publish(site.old)

    assert names(site.path.parent) == []


@needs_mounts
def test_a_mount_point_is_refused_with_advice(site: Site) -> None:
    with (
        mounted_tmpfs(site.path, "1m"),
        pytest.raises(InvalidRequestError, match="it is a mount point; name a directory below"),
    ):
        site.publish(site.old)
