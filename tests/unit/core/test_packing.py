"""Small files are cut into parcels: every file once, in order, and never more than one chunk holds."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import CHUNK_SIZE
from bdn.core.source.listing import Identity, UpstreamFile
from bdn.core.store import PARCEL_FILES, SEAL_SIZE, SMALL_FILE_SIZE, is_small, parcels


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


def test_what_is_one_organisation_s_never_shares_a_parcel_with_what_is_another_s() -> None:
    files = [file(0, 1, "public"), file(1, 1, "organisation:a"), file(2, 1, "organisation:a"), file(3, 1, "public")]
    assert [[each.path for each in parcel] for parcel in parcels(files)] == [
        ["000000"],
        ["000001", "000002"],
        ["000003"],
    ]


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
