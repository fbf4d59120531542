"""A chunk is asked of at most three owners, never of ourselves, and never in a circle; who comes before us is known."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.ring.placement import Placement, ahead, lanes, route
from tests.support.content.names import named

names = st.sampled_from(["a", "b", "c", "d", "me"])
walks = st.permutations(["a", "b", "c", "d", "me"]).flatmap(
    lambda walk: st.integers(0, 5).map(lambda stop: walk[:stop])
)


@given(owners=walks, avoided=st.sets(names))
def test_the_peers_are_the_first_three_before_us_that_are_not_avoided(owners: list[str], avoided: set[str]) -> None:
    before_us = takewhile(lambda owner: owner != "me", owners)
    expected = [owner for owner in before_us if owner not in avoided][:3]
    assert route(owners, "me", avoided.__contains__) == tuple(expected)


@given(owners=walks, avoided=st.sets(names))
def test_whoever_is_asked_asks_nobody_who_asks_it(owners: list[str], avoided: set[str]) -> None:
    # All agree on the walk, and everybody asks only those who stand before it: there is no way back.
    for position, owner in enumerate(owners):
        asked = route(owners, owner, avoided.__contains__)
        assert all(owners.index(peer) < position for peer in asked)


@given(owners=walks)
def test_that_we_are_avoided_ourselves_changes_nothing(owners: list[str]) -> None:
    assert route(owners, "me", lambda peer: peer == "me") == route(owners, "me", lambda _: False)


@given(st.integers(2, 9), st.data())
def test_who_is_ahead_of_us_comes_to_the_owners_first_chunk_before_us(count: int, data: st.DataObject) -> None:
    members = [f"node-{number}" for number in range(count)]
    placement = Placement([named(f"chunk {number}") for number in range(20 * count)], members)
    owner, me = data.draw(st.permutations(members))[:2]
    first = placement.owned[members.index(owner)][0]
    moments = {node: lanes(placement, node).peers.index(first) for node in members if node != owner}
    assert set(ahead(members, owner, me)) == {node for node, moment in moments.items() if moment < moments[me]}


@pytest.mark.parametrize(("owner", "me"), [("a", "x"), ("x", "a"), ("b", "b")])
def test_nobody_is_ahead_of_a_stranger_with_one_or_with_ourselves(owner: str, me: str) -> None:
    assert ahead(["a", "b", "c"], owner, me) == ()
