from pathlib import Path

import pytest

from bdn.core.cache.index import CacheIndex
from bdn.core.chunk import digest_of
from node_agent.cache.held_chunks import HeldChunks
from node_agent.cache.quarantine import SuspectFiles
from node_agent.cache.records import ManifestRecords, ScannedManifest
from node_agent.cache.tiers import Scanner
from node_agent.disk.places import Places, temporary_name
from node_agent.disk.whole_files import WholeFiles
from tests.support.agent.cache import a_tier, cached, put
from tests.support.content.trees import names


def scan(places: Places) -> list[ScannedManifest]:
    files, suspects = WholeFiles(places), SuspectFiles()
    chunks = HeldChunks(files, CacheIndex(), a_tier(places.root), suspects.add)
    return Scanner(files, ManifestRecords(places), chunks, suspects).run()


def test_what_is_whole_is_found_least_recently_used_first(tmp_path: Path) -> None:
    places, new = cached(tmp_path, {"a": b"aa", "b": b"b"})
    old = put(places, {"c": b"ccc"}, used=10.5)

    found = scan(places)

    assert [(one.manifest, one.last_used) for one in found] == [(old.digest, 10.5), (new.digest, 1000.0)]
    assert found[1].present == {digest_of(b"aa"): True, digest_of(b"b"): True}


def test_a_file_that_no_manifest_names_is_what_an_interrupted_eviction_left(tmp_path: Path) -> None:
    places, _ = cached(tmp_path, {"a": b"aa"})
    gone = put(places, {"b": b"bb"})
    places.manifest(gone.digest).unlink()

    scan(places)

    assert names(places.files) == [digest_of(b"aa").hex]
    assert not places.manifest(gone.digest).parent.exists()  # the pages of the evicted manifest went, too


def test_a_file_of_the_wrong_size_is_put_aside_and_is_absent(tmp_path: Path) -> None:
    places, _ = cached(tmp_path, {"a": b"aa", "b": b"b"})
    path = places.file(digest_of(b"aa"))
    path.chmod(0o644)
    path.write_bytes(b"a")

    found = scan(places)

    assert found[0].present == {digest_of(b"b"): True}
    assert not path.exists()
    assert (places.quarantine / f"{path.name}.0").read_bytes() == b"a"


def test_a_manifest_whose_root_is_damaged_is_put_aside_with_what_it_named(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"a": b"aa"})
    places.manifest(manifest.digest).write_bytes(b"{}")

    assert scan(places) == []
    assert names(places.files) == names(places.manifests) == []
    assert names(places.quarantine) == [f"{manifest.digest.hex}.0"]


@pytest.mark.parametrize("content", [b"{}", None], ids=["damaged", "absent"])
def test_a_manifest_without_a_right_page_is_not_held(tmp_path: Path, content: bytes | None) -> None:
    places, manifest = cached(tmp_path, {"a": b"aa"})
    folder = places.manifest(manifest.digest).parent
    (page,) = (path for path in folder.iterdir() if path.name != manifest.digest.hex)
    page.unlink()
    if content is not None:
        page.write_bytes(content)

    assert scan(places) == []
    assert names(places.files) == names(places.manifests) == []


def test_parts_are_kept_while_a_manifest_names_them(tmp_path: Path) -> None:
    places, _ = cached(tmp_path, {"a": b"aa", "b": b"b"})
    wanted, unwanted = digest_of(b"aa"), digest_of(b"unwanted")
    places.file(wanted).unlink()
    for digest in (wanted, unwanted):
        places.part(digest).write_bytes(b"..")
        places.bitmap(digest).write_bytes(b"..")
    places.bitmap(digest_of(b"b")).write_bytes(b"left after the commit")

    found = scan(places)

    assert found[0].present == {wanted: False, digest_of(b"b"): True}
    assert names(places.filling) == sorted([f"{wanted.hex}.part", f"{wanted.hex}.bitmap"])


@pytest.mark.parametrize("name", ["strange", "x.json.tmp"])
def test_what_is_not_ours_does_not_stop_the_start(tmp_path: Path, name: str) -> None:
    places, manifest = cached(tmp_path, {"a": b"aa"})
    for folder in (places.files, places.filling, places.manifests):
        (folder / name).write_bytes(b"")

    assert [found.manifest for found in scan(places)] == [manifest.digest]


def test_small_files_that_were_being_written_are_removed(tmp_path: Path) -> None:
    places, manifest = cached(tmp_path, {"a": b"aa"})
    aside = places.files / temporary_name(digest_of(b"aa"))
    aside.write_bytes(b"a")

    assert [found.manifest for found in scan(places)] == [manifest.digest]
    assert not aside.exists()
