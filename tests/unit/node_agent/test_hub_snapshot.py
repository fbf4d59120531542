"""A snapshot in the cache of the hub's client, as the agent builds it."""

from pathlib import Path

import pytest

from bdn.core.errors import InvalidRequestError
from node_agent.disk.whole_files import ChangedFilesError
from tests.doubles.hub_repository import HubFile as Listed
from tests.support.agent.hub_place import COMMIT, FILES, HubPlace
from tests.support.content.trees import tree


@pytest.fixture
def place(tmp_path: Path) -> HubPlace:
    return HubPlace(tmp_path)


def test_hub_snapshot__published_twice__is_intact_and_whole_and_leaves_the_cache_as_it_was(place: HubPlace) -> None:
    first = place.pull()
    second = place.pull()

    assert (first.inode, place.snapshot.is_intact(second)) == (second.inode, True)
    assert place.offline() == FILES
    assert place.files.changed(place.manifest.contents) == []
    assert {path.name for path in place.repository.folder.iterdir()} == {"blobs", "refs", "snapshots", "trees"}


def test_hub_snapshot__of_changed_cached_files__leaves_nothing(place: HubPlace) -> None:
    place.list()
    place.files.forget(place.manifest.contents)

    with pytest.raises(ChangedFilesError):
        place.build()
    place.snapshot.clear()

    assert tree(place.repository.folder).keys() == {f"trees/{COMMIT}.json"}
    assert place.snapshot.inode() is None


@pytest.mark.parametrize("listed", [{}, {"config.json": b"{}"}], ids=["empty", "part"])
def test_hub_snapshot__of_files_that_the_listing_lacks__is_refused(tmp_path: Path, listed: dict[str, bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="lacks"):
        HubPlace(tmp_path, listed).pull()


@pytest.mark.parametrize("content", ["", "[]", '{"files": []}', '{"files": {"config.json": {}}}'])
def test_hub_snapshot__with_a_listing_that_is_none__is_refused(place: HubPlace, content: str) -> None:
    place.list()
    (place.repository.folder / f"trees/{COMMIT}.json").write_text(content)

    with pytest.raises(InvalidRequestError, match="cannot read the listing"):
        place.build()


def test_hub_snapshot__with_an_etag_that_is_a_path__is_refused(place: HubPlace) -> None:
    place.list()
    listing = place.repository.folder / f"trees/{COMMIT}.json"
    listing.write_text(listing.read_text().replace(Listed("config.json", b"{}").oid, "../../../outside"))

    with pytest.raises(InvalidRequestError, match=r"lacks 'config\.json'"):
        place.build()


def test_hub_snapshot__with_a_link_that_leads_elsewhere__is_put_right(place: HubPlace) -> None:
    before = place.pull()
    link = place.snapshot.path / "config.json"
    link.unlink()
    link.symlink_to("a/b/deep.txt")

    assert not place.snapshot.is_intact(before)
    place.pull()

    assert (place.snapshot.is_intact(before), place.offline()) == (True, FILES)
