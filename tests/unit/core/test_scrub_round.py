"""In which order a scrub reads, when it begins anew, and what it finds left after a restart."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.cache.scrub_round import Position, ScrubRound
from bdn.core.chunk import Digest
from tests.support.content.names import named

names = st.integers(0, 9).map(lambda number: named(str(number)))
holdings = st.dictionaries(names, st.tuples(st.sets(names), st.sets(names)), max_size=5)


def walked(one: ScrubRound, held: dict[Digest, tuple[set[Digest], set[Digest]]]) -> list[Position]:
    return [place for manifest in one.manifests(held) for place in one.positions(manifest, *held[manifest])]


@given(holdings, st.data())
def test_a_round_that_is_cut_anywhere_goes_on_with_exactly_the_rest(
    held: dict[Digest, tuple[set[Digest], set[Digest]]], data: st.DataObject
) -> None:
    whole = walked(ScrubRound(0), held)
    cut = data.draw(st.integers(0, len(whole)))

    rest = walked(ScrubRound(0, whole[cut - 1] if cut else None), held)

    assert whole[:cut] + rest == whole
    assert len(set(whole)) == len(whole) == sum(len(files) + len(chunks) for files, chunks in held.values())


@given(holdings, holdings, st.data())
def test_whatever_comes_and_goes_meanwhile_what_stays_is_read_once(
    held: dict[Digest, tuple[set[Digest], set[Digest]]],
    later: dict[Digest, tuple[set[Digest], set[Digest]]],
    data: st.DataObject,
) -> None:
    before = walked(ScrubRound(0), held)
    cut = data.draw(st.integers(0, len(before)))
    after = walked(ScrubRound(0, before[cut - 1] if cut else None), later)

    staying = set(before) & set(walked(ScrubRound(0), later))
    assert all((before[:cut] + after).count(place) == 1 for place in staying)


def test_the_next_round_begins_a_period_after_the_last_one_began() -> None:
    ended = ScrubRound(1000, ended=1900)

    assert [ended.is_due(600, now) for now in (1000, 1599, 1600, 5000)] == [False, False, True, True]


def test_a_round_under_way_is_not_begun_again() -> None:
    assert not ScrubRound(1000).is_due(600, 9999)


def test_a_clock_that_was_set_back_is_no_reason_to_wait_for_years() -> None:
    assert ScrubRound(9999, ended=10_000).is_due(600, 5)
