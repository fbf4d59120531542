"""When what is read in rounds is read again, in which order a scrub reads, and what it finds left after a restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.chunk import Digest
from bdn.core.pace.rounds import Position, ScrubRound, is_round_due
from tests.support.content.names import named


@pytest.mark.parametrize(("began", "now", "is_due"), [
    (None, 0.0, True), (None, 1e9, True),  # nothing was ever read
    (1000.0, 1000.0, False), (1000.0, 1099.9, False), (1000.0, 1100.0, True), (1000.0, 9999.0, True),
    (1000.0, 999.9, True), (1000.0, 0.0, True),  # a clock that was set back puts off nothing
])  # fmt: skip
def test_rounds_begin_a_period_apart(began: float | None, now: float, is_due: bool) -> None:
    assert is_round_due(began, 100.0, now) == is_due
    assert not is_round_due(began, 0, now)  # no period is never


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


def test_a_round_under_way_is_not_begun_again() -> None:
    assert not ScrubRound(1000).is_due(600, 9999)
    assert [ScrubRound(1000, ended=1900).is_due(600, now) for now in (5, 1599, 1600)] == [True, False, True]
