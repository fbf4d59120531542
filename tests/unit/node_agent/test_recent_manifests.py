"""Manifests that were read lately are not parsed again, are not too many, and say nothing about what is on the disk."""

import pytest

from bdn.core.chunk import Digest, FileEntry, Manifest
from node_agent.cache.records import Held, ManifestRecords, RecentManifests
from node_agent.disk.places import Places
from tests.support.content.names import named


def manifest(word: str, files: int) -> Manifest:
    return Manifest.of([FileEntry(f"{word}/{number}", 1, named(word)) for number in range(files)])


ONE, TWO, THREE, LARGE = manifest("one", 4), manifest("two", 4), manifest("three", 4), manifest("large", 9)


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ("put one, put two, get one, put three", (ONE, THREE)),
        ("put one, put one, put one, put two", (ONE, TWO)),  # it counts once
        ("put one, put large", ()),  # larger than all that may be kept
        ("put one, put large, put one, put two", (ONE, TWO)),
        ("put one, put two, forget one, forget one, put three", (TWO, THREE)),
    ],
)
def test_as_many_manifests_are_kept_as_have_few_files_the_last_used_ones(steps: str, kept: tuple[Manifest]) -> None:
    known = {"one": ONE, "two": TWO, "three": THREE, "large": LARGE}
    recent = RecentManifests(limit=8)
    for verb, name in map(str.split, steps.split(", ")):
        getattr(recent, verb)(known[name] if verb == "put" else known[name].digest)

    assert tuple(one for one in known.values() if recent.get(one.digest)) == kept


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
