"""Manifests that were read lately are not parsed again, are not too many, and say nothing about what is on the disk."""

import pytest

from node_agent.cache.records import Held, ManifestRecords, RecentManifests
from node_agent.disk.places import Places
from tests.support.content.layouts import held_of, whole


def held(word: str, files: int) -> Held:
    return held_of({f"{word}/{number}": whole(word.encode()) for number in range(files)})


ONE, TWO, THREE, LARGE = held("one", 4), held("two", 4), held("three", 4), held("large", 9)


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
def test_as_many_manifests_are_kept_as_have_few_files_the_last_used_ones(steps: str, kept: tuple[Held]) -> None:
    known = {"one": ONE, "two": TWO, "three": THREE, "large": LARGE}
    recent = RecentManifests(limit=8)
    for verb, name in map(str.split, steps.split(", ")):
        getattr(recent, verb)(known[name] if verb == "put" else known[name].root.digest)

    assert tuple(one for one in known.values() if recent.get(one.root.digest)) == kept


def saved(places: Places) -> ManifestRecords:
    records = ManifestRecords(places)
    records.save(ONE, now=1.0)
    return records


def test_a_saved_manifest_is_not_parsed_again(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    records = saved(places)

    def of(*_: object) -> Held:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(Held, "of", of)
    assert records.load(ONE.root.digest) is ONE


def test_a_manifest_whose_record_vanished_is_not_held(places: Places) -> None:
    records = saved(places)
    places.manifest(ONE.root.digest).unlink()

    assert records.load(ONE.root.digest) is None


def test_a_damaged_manifest_is_not_held_until_it_is_saved_again(places: Places) -> None:
    saved(places)
    page = places.document(ONE.root.digest, ONE.root.pages[0].digest)
    page.write_bytes(page.read_bytes().replace(b"one/1", b"one/x"))
    records = ManifestRecords(places)
    assert [records.load(ONE.root.digest), records.load_layout(ONE.root.digest)] == [None, None]

    records.save(ONE, now=2.0)

    assert ManifestRecords(places).load(ONE.root.digest) == ONE


def test_a_manifest_is_held_once_its_root_is_there_until_it_is_evicted(places: Places) -> None:
    records = saved(places)
    (page,) = (one.digest for one in ONE.root.pages)
    assert places.document(ONE.root.digest, page).read_bytes() == ONE.pages[0]

    records.forget(ONE.root.digest)

    assert records.load(ONE.root.digest) is None
    assert not places.manifest(ONE.root.digest).parent.exists()
