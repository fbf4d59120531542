"""A snapshot in the cache of the hub's client, and what the client makes of one that was left unfinished."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from bdn.cli.hub_cache import HubRepository
from bdn.core.errors import InvalidRequestError
from bdn.core.source.uri import WeightsSource, parse_source
from bdn.wire.mirror_schema import HubFile
from node_agent.disk.whole_files import ChangedFilesError
from node_agent.stage.view.destination import Earlier
from node_agent.stage.view.hub import HubSnapshot
from tests.doubles.hub_repository import HubFile as Listed
from tests.support.agent.cache import cached, whole_files
from tests.support.content.trees import tree

COMMIT = "c0ffee" + "0" * 34
FILES = {"config.json": b"{}", "a/b/deep.txt": b"deep", "empty": b"", "weights.safetensors": b"in LFS"}


class Place:
    """A cache with a tree, and a hub cache that has its listing."""

    def __init__(self, root: Path, listed: Mapping[str, bytes] = FILES) -> None:
        places, self.manifest = cached(root / "cache", FILES)
        self.files = whole_files(places)
        self.root = root / "hub"
        wanted = WeightsSource(parse_source("hf://org/model"), "/m")
        self.repository = HubRepository.of(wanted, self.root)
        self.repository.write_tree(COMMIT, map(self._listed, listed, listed.values()))
        self.repository.write_ref(COMMIT)
        self.snapshot = self.again()

    def again(self) -> HubSnapshot:
        return HubSnapshot(self.repository.snapshot(COMMIT), "stg_x", self.files)

    def build(self) -> None:
        self.again().build(self.manifest, None, threading.Event())

    def publish(self) -> Earlier:
        self.build()
        snapshot = self.again()
        snapshot.publish(self.manifest, None)
        snapshot.clear()
        return Earlier(snapshot.inode() or 0, self.manifest.digest, self.manifest, 0)

    def offline(self) -> dict[str, bytes]:
        return tree(Path(snapshot_download("org/model", cache_dir=self.root, local_files_only=True)))

    @staticmethod
    def _listed(path: str, content: bytes) -> HubFile:
        file = Listed(path, content)
        return HubFile(path=path, size=file.size, blob_id=file.oid, lfs_sha256=file.sha256 if file.is_lfs else None)


def test_hub_snapshot__published__is_intact_for_us_and_whole_for_the_client(tmp_path: Path) -> None:
    place = Place(tmp_path)

    first = place.publish()
    second = place.publish()

    assert (first.inode, place.snapshot.is_intact(second)) == (second.inode, True)
    assert place.offline() == FILES
    assert place.files.changed(place.manifest.contents) == []
    assert {path.name for path in place.repository.folder.iterdir()} == {"blobs", "refs", "snapshots", "trees"}


def test_hub_snapshot__killed_before_its_last_links__is_incomplete_for_the_client_and_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish()
    place.build()
    (place.snapshot.path / "a/b/deep.txt").unlink()

    with pytest.raises(IncompleteSnapshotError):
        place.offline()
    place.publish()

    assert place.offline() == FILES


def test_hub_snapshot__of_changed_cached_files__leaves_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.files.forget(place.manifest.contents)

    with pytest.raises(ChangedFilesError):
        place.build()
    place.snapshot.clear()

    assert tree(place.repository.folder).keys() == {f"trees/{COMMIT}.json", "refs/main"}
    assert place.snapshot.inode() is None


@pytest.mark.parametrize("listed", [{}, {"config.json": b"{}"}], ids=["empty", "part"])
def test_hub_snapshot__of_files_that_the_listing_lacks__is_refused(tmp_path: Path, listed: dict[str, bytes]) -> None:
    place = Place(tmp_path, listed)

    with pytest.raises(InvalidRequestError, match="lacks"):
        place.build()


def test_hub_snapshot__with_a_listing_of_hostile_etags__is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    listing = place.repository.folder / f"trees/{COMMIT}.json"
    listing.write_text(listing.read_text().replace(Listed("config.json", b"{}").oid, "../../../outside"))

    with pytest.raises(InvalidRequestError, match=r"lacks 'config\.json'"):
        place.build()


def test_hub_snapshot__a_link_that_leads_elsewhere__is_not_intact_and_is_put_right(tmp_path: Path) -> None:
    place = Place(tmp_path)
    before = place.publish()
    link = place.snapshot.path / "config.json"
    link.unlink()
    link.symlink_to("a/b/deep.txt")

    assert not place.snapshot.is_intact(before)
    place.publish()

    assert (place.snapshot.is_intact(before), place.offline()) == (True, FILES)
