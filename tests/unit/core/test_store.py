"""What lies in a store: parcels, seals, slabs and pieces; and what is old enough to be collected."""

from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.core.source.upstream import Identity, UpstreamFile
from bdn.core.store import (
    CLOCKS_SECONDS,
    PARCEL_FILES,
    SEAL_SIZE,
    SMALL_FILE_SIZE,
    Needed,
    Piece,
    SlabNeeds,
    closed_up,
    collectable_before,
    is_closed_to,
    is_small,
    parcels,
    reader_of,
    scope_of,
    seal_of,
)
from tests.support.content.names import named


def test_only_what_is_older_than_the_grace_may_go() -> None:
    assert collectable_before(1000.0, 100.0, None) == 900.0
    assert collectable_before(1000.0, 600.0, 990.0) == 400.0
    assert collectable_before(1000.0, 100.0, 500.0) == 500.0 - CLOCKS_SECONDS  # when the oldest mirror at work began


def file(number: int, size: int, scope: str = "public") -> UpstreamFile:
    return UpstreamFile(f"{number:06}", size, Identity.of(scope, str(number)), str(number), "v")


def test_a_file_of_a_mebibyte_is_not_small_and_neither_is_an_empty_one() -> None:
    sizes = (0, 1, SMALL_FILE_SIZE - 1, SMALL_FILE_SIZE, CHUNK_SIZE)
    assert [is_small(size) for size in sizes] == [False, True, True, False, False]


def test_a_parcel_is_filled_to_the_last_byte_that_a_seal_leaves_of_a_chunk() -> None:
    part = (CHUNK_SIZE - SEAL_SIZE) // 16
    files = [file(number, part) for number in range(33)]
    assert [len(parcel) for parcel in parcels(files)] == [16, 16, 1]


def test_tiny_files_are_cut_by_their_number() -> None:
    files = [file(number, 1) for number in range(2 * PARCEL_FILES + 1)]
    assert [len(parcel) for parcel in parcels(files)] == [PARCEL_FILES, PARCEL_FILES, 1]


def test_a_hundred_thousand_small_files_are_a_few_hundred_objects() -> None:
    assert sum(1 for _ in parcels(file(number, 300) for number in range(100_000))) < 400


@given(st.lists(st.tuples(st.integers(1, SMALL_FILE_SIZE - 1), st.sampled_from("ab")), max_size=60))
def test_every_file_is_in_exactly_one_parcel_in_order(sizes: list[tuple[int, str]]) -> None:
    files = [file(number, size, scope) for number, (size, scope) in enumerate(sizes)]
    made = list(parcels(files))
    assert [each for parcel in made for each in parcel] == files
    for parcel in made:
        assert sum(each.size for each in parcel) <= CHUNK_SIZE - SEAL_SIZE
        assert len({each.identity.scope for each in parcel}) == 1


def piece(content: bytes, offset: int) -> Piece:
    return Piece(digest_of(content), offset, len(content), digest_of(content), len(content), 0)


def test_what_is_left_of_a_slab_closes_up_in_its_order() -> None:
    pieces = [piece(b"last", 90), piece(b"first", 3), piece(b"middle", 20)]
    placed = closed_up(pieces)
    assert [(one.offset, offset) for one, offset in placed] == [(3, 0), (20, 5), (90, 11)]


def test_the_whole_is_asked_for_by_the_object_s_own_name() -> None:
    needed = Needed(named("slab"), 100, (piece(b"first", 3),), ("public",))
    assert (needed.whole.name, needed.whole.offset, needed.whole.size) == (named("slab"), 0, 100)
    assert needed.whole.content == digest_of(b"first")


NAMES = st.text(st.characters(exclude_characters=":"), min_size=1, max_size=20)


@given(NAMES, NAMES)
def test_a_seal_opens_for_its_organisation_alone(owner: str, asking: str) -> None:
    assert is_closed_to(asking, seal_of(f"organisation:{owner}")) is (asking != owner)


@given(NAMES, NAMES, NAMES)
def test_seal_of_a_team__opens_for_the_team_and_its_whole_organisation(owner: str, team: str, asking: str) -> None:
    seal = seal_of(scope_of(reader_of(owner, team)))
    readers = (asking, reader_of(asking, team), reader_of(owner, asking))
    assert [is_closed_to(one, seal) for one in readers] == [asking != owner, asking != owner, asking != team]
    assert is_closed_to(reader_of(owner, team), seal_of(scope_of(owner)))
    assert len(seal) == SEAL_SIZE


@given(st.binary(max_size=2 * SEAL_SIZE), NAMES)
def test_what_ends_in_no_seal_is_open(tail: bytes, asking: str) -> None:
    assert not is_closed_to(asking, tail)


def test_public_slabs_have_none_and_all_others_are_as_long() -> None:
    assert seal_of("public") == b""
    assert {len(seal_of(f"organisation:{name}")) for name in ("", "a", "an-organisation" * 4)} == {SEAL_SIZE}


def needs(slabs: Mapping[str, tuple[str, str]], whole: Iterable[str] = (), damaged: Iterable[str] = ()) -> SlabNeeds:
    """From the slabs' scopes and the letters in each: ``{"S": ("public", "ab")}``. Every slab is 10 bytes."""
    found = SlabNeeds()
    for slab, (scopes, inside) in slabs.items():
        found.add_slab(slab, 10)
        for scope in scopes.split():
            found.add_scope(slab, scope)
        for content in inside:
            found.add_slice(content, slab)
    for slab in damaged:
        found.add_damaged(slab)
    for content in whole:
        found.add_whole(content)
    return found


def test_a_damaged_slab_does_not_stand_in_and_nobody_needs_it_where_another_one_does() -> None:
    slabs = {"S": ("public", "ax"), "T": ("public", "bx")}
    assert needs(slabs, damaged="T").take("a") == []
    assert needs(slabs, damaged="S").take("a") == ["S"]
    assert needs(slabs, damaged="S").take("b") == []


def test_what_went_before_does_not_stand_in() -> None:
    known = needs({"S": ("public", "ab"), "T": ("public", "bc")})
    assert known.size(["S", "T"]) == 20
    assert known.take("a") == ["S"]
    known.add_slice("b", "S")  # told again, as the database still says so
    known.add_slice("a", "T")
    assert known.take("c") == []
    assert known.take("b") == ["T"]
