"""Manifests that were read lately are not parsed again, are not too many, and say nothing about what is on the disk."""

from pathlib import Path

import pytest

from bdn.core.chunk import Digest, FileEntry, Manifest
from node_agent.cache.records import Held, ManifestRecords, RecentManifests
from node_agent.disk.places import Places
from tests.support.content.names import named


def manifest(word: str, files: int) -> Manifest:
    return Manifest.of([FileEntry(f"{word}/{number}", 1, named(word)) for number in range(files)])


ONE, TWO, THREE = manifest("one", 4), manifest("two", 4), manifest("three", 4)


def kept(recent: RecentManifests, *manifests: Manifest) -> list[Manifest]:
    return [one for one in manifests if recent.get(one.digest) is not None]


def test_the_one_used_longest_ago_goes_first() -> None:
    recent = RecentManifests(limit=8)
    recent.put(ONE)
    recent.put(TWO)
    recent.get(ONE.digest)
    recent.put(THREE)

    assert kept(recent, ONE, TWO, THREE) == [ONE, THREE]


def test_a_manifest_that_comes_twice_counts_once() -> None:
    recent = RecentManifests(limit=8)
    for _ in range(3):
        recent.put(ONE)
    recent.put(TWO)

    assert kept(recent, ONE, TWO) == [ONE, TWO]


def test_one_larger_than_all_that_may_be_kept_is_not_kept_and_leaves_an_empty_book() -> None:
    recent = RecentManifests(limit=8)
    recent.put(ONE)
    recent.put(manifest("large", 9))
    assert kept(recent, ONE, manifest("large", 9)) == []

    recent.put(ONE)
    recent.put(TWO)
    assert kept(recent, ONE, TWO) == [ONE, TWO]


def test_what_is_forgotten_makes_room() -> None:
    recent = RecentManifests(limit=8)
    recent.put(ONE)
    recent.put(TWO)
    recent.forget(ONE.digest)
    recent.forget(ONE.digest)  # nothing there is fine
    recent.put(THREE)

    assert kept(recent, ONE, TWO, THREE) == [TWO, THREE]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path / "cache", None)
    places.make()
    return places


def saved(places: Places) -> ManifestRecords:
    records = ManifestRecords(places)
    records.save(Held(ONE, None), now=1.0)
    return records


def test_a_saved_manifest_is_not_parsed_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    records = saved(places)

    def parse(_: bytes) -> Manifest:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(Manifest, "parse", parse)
    assert records.load(ONE.digest) is ONE


def test_an_evicted_manifest_is_not_remembered(places: Places) -> None:
    records = saved(places)
    records.forget(ONE.digest)

    assert records.load(ONE.digest) is None


def test_a_manifest_whose_record_vanished_is_not_held(places: Places) -> None:
    records = saved(places)
    places.manifest(ONE.digest).unlink()

    assert records.load(ONE.digest) is None


def test_a_record_that_is_not_what_its_name_says_is_not_remembered(places: Places) -> None:
    records, wrong = ManifestRecords(places), Digest("0" * 64)
    places.manifest(wrong).write_bytes(ONE.canonical)

    assert [records.load(wrong), records.load(wrong), records.load(ONE.digest)] == [None, None, None]
