"""What a survey makes of a listing: units that are copied as one, what of them is missing, and where every file lies in the end."""

from bdn.core.chunk import CHUNK_SIZE, EMPTY, FileLayout, Slice, digest_of
from bdn.core.manifest import PlacedFile
from bdn.core.source.upstream import Identity, Listing, Resolution, UpstreamFile
from bdn.mirror.db.identities import NOT_YET, Known
from bdn.mirror.ingest.survey import Survey, units_before, units_of

MIB = 1024 * 1024


def file(path: str, size: int) -> UpstreamFile:
    return UpstreamFile(path, size, Identity.of("public", path, str(size)), path, "v")


FILES = [file("a", 10), file("b", 3 * CHUNK_SIZE), file("c", 0), file("d", 20), file("e", MIB), file("f", MIB - 1)]
SLAB = digest_of(b"slab")


def known(files: list[UpstreamFile]) -> dict[str, Known]:
    """All units of these files, as if they were stored."""
    found: dict[str, Known] = {}
    for unit in units_of(files):
        if unit.is_slab:
            raw = b"".join(digest_of(one.path.encode()).to_bytes() for one in unit.files)
            found[unit.key] = Known(unit.key, unit.size, SLAB, raw, is_slab=True)
        else:
            count = -(-unit.size // CHUNK_SIZE)
            chunks = tuple(digest_of(f"{unit.files[0].path} {index}".encode()) for index in range(count))
            raw = b"".join(chunk.to_bytes() for chunk in chunks)
            found[unit.key] = Known(unit.key, unit.size, FileLayout.of(unit.size, chunks).digest, raw)
    return found


def survey(files: list[UpstreamFile], found: dict[str, Known]) -> Survey:
    lacking = {unit.key: unit.size for unit in units_of(files) if unit.key not in found or not found[unit.key].digest}
    return Survey(Resolution(None), Listing(files), found, (), lacking)


def test_units_of__small_files_are_together_and_large_ones_by_themselves() -> None:
    units = [[one.path for one in unit.files] for unit in units_of(FILES)]
    assert units == [["b"], ["e"], ["a", "d", "f"]]


def test_units_of__the_same_files_have_the_same_keys_and_one_changed_file_another() -> None:
    keys = [unit.key for unit in units_of(FILES)]
    assert keys == [unit.key for unit in units_of(FILES)]
    for path in ("a", "d"):
        changed = [file(path, 11) if one.path == path else one for one in FILES]
        assert [unit.key for unit in units_of(changed)][:2] == keys[:2]
        assert [unit.key for unit in units_of(changed)][2] != keys[2]


def test_placed__files_come_in_order_with_their_places() -> None:
    placed = list(survey(FILES, known(FILES)).placed())
    assert [one.path for one in placed] == [one.path for one in FILES]
    size = 10 + 20 + MIB - 1
    slices = {one.path: one.layout.slice for one in placed}
    assert slices == {
        "a": Slice(SLAB, size, 0), "b": None, "c": None, "d": Slice(SLAB, size, 10), "e": None, "f": Slice(SLAB, size, 30),
    }  # fmt: skip
    assert placed[2] == PlacedFile("c", FileLayout(EMPTY, 0, ()))
    assert [len(one.layout.chunks) for one in placed] == [1, 3, 0, 1, 1, 1]


def test_missing__is_what_is_not_whole_and_each_key_once() -> None:
    found = known(FILES)
    twice = [*FILES, UpstreamFile("z", 3 * CHUNK_SIZE, FILES[1].identity, "z", "v")]
    assert list(survey(twice, found).missing()) == []
    large = FILES[1].identity.key
    half = found[large].without({next(iter(found[large].chunks.values()))})
    assert half is not None
    looked = survey(twice, found | {large: half})
    assert [unit.key for unit in looked.missing()] == [large]
    assert looked.bytes_missing_of(next(looked.missing())) == CHUNK_SIZE
    del found[large]
    assert [unit.key for unit in survey(twice, found).missing()] == [large]


def test_known__a_slab_without_its_chunk_is_not_known_and_a_file_in_part() -> None:
    found = known(FILES)
    slab = next(one for one in found.values() if one.is_slab)
    assert slab.without({SLAB}) is None
    assert slab.without({digest_of(b"other")}) == slab or slab.without(set()) == slab
    whole = found[FILES[1].identity.key]
    first = whole.chunks[0]
    half = whole.without({first})
    assert half is not None
    assert (half.digest, half.raw[:32]) == (None, NOT_YET)
    assert half.without(set(whole.chunks.values())) is None


def test_contents__are_the_files_and_what_is_known_of_them() -> None:
    found = known(FILES)
    slab = next(key for key, one in found.items() if one.is_slab)
    del found[slab]
    contents = {one.path: digest is not None for one, digest in survey(FILES, found).contents()}
    assert contents == {"a": False, "b": True, "d": False, "e": True, "f": False}


def test_units_before__are_whole_where_an_earlier_manifest_has_the_same_slab() -> None:
    placed = {one.path: one.layout for one in survey(FILES, known(FILES)).placed()}
    prior = {one.identity.key: placed[one.path] for one in FILES}
    assert {unit.key: units_before(unit, prior) for unit in units_of(FILES)} == known(FILES)
    for path in ("a", "d", "f"):  # a chunk holds bytes of one selection only
        fewer = [one for one in FILES if one.path != path]
        slab = next(unit for unit in units_of(fewer) if unit.is_slab)
        assert units_before(slab, prior) is None
