"""Both lanes together are the manifest, and members do not get into each other's way."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.ring.placement import Placement, lanes, own_in_flight
from tests.support.content.names import named

placements = st.builds(
    lambda chunks, members: Placement(
        [named(f"chunk {number}") for number in range(chunks)], [f"node-{number}" for number in range(members)]
    ),
    st.integers(0, 80),
    st.integers(0, 9),
)
nodes = st.integers(0, 10).map(lambda number: f"node-{number}")


@given(placement=placements, me=nodes)
def test_every_chunk_is_in_one_lane_and_once(placement: Placement, me: str) -> None:
    order = lanes(placement, me)
    assert sorted(order.own + order.peers) == list(range(len(placement)))


@given(placement=placements, me=nodes)
def test_the_own_lane_is_what_the_node_owns_in_the_order_of_the_manifest(placement: Placement, me: str) -> None:
    mine = [index for index in range(len(placement)) if placement.owner(index) in {me, None}]
    assert lanes(placement, me).own == tuple(mine)


@given(placement=placements, me=nodes)
def test_no_owner_is_asked_again_before_every_other_that_has_more_was_asked(placement: Placement, me: str) -> None:
    order = lanes(placement, me).peers
    left = Counter(placement.owner(index) for index in order)
    asked: Counter[str | None] = Counter()
    for index in order:
        owner = placement.owner(index)
        assert all(asked[owner] <= asked[other] for other, more in left.items() if more)
        asked[owner] += 1
        left[owner] -= 1


@given(placement=placements, me=nodes)
def test_the_chunks_of_one_owner_are_asked_in_the_order_in_which_it_reads_them(placement: Placement, me: str) -> None:
    order = lanes(placement, me).peers
    for owner in placement.members:
        theirs = [index for index in order if placement.owner(index) == owner]
        assert theirs == sorted(theirs)


@given(placement=placements.filter(lambda placement: len(placement) >= 40 and len(placement.members) > 1))
def test_in_a_round_of_all_owners_no_two_members_ask_the_same_one_at_the_same_time(placement: Placement) -> None:
    members = placement.members
    orders = [lanes(placement, me).peers for me in members]
    have = Counter(placement.owner(index) for index in range(len(placement)))
    for position in range(min(have[member] for member in members) * (len(members) - 1)):
        asked = [placement.owner(order[position]) for order in orders]
        assert len(set(asked)) == len(members)


# --- single clusters ---

CHUNKS = [named(f"chunk {number}") for number in range(40)]


def test_without_members_all_is_read_from_the_mirror_and_a_single_member_asks_no_peer() -> None:
    alone = lanes(Placement(CHUNKS, []), "me")
    assert (alone.own, alone.peers) == (tuple(range(40)), ())
    assert lanes(Placement(CHUNKS, ["me"]), "me").peers == ()


def test_nodes_that_are_no_members_ask_for_everything_and_begin_with_different_owners() -> None:
    placement = Placement(CHUNKS, ["a", "b", "c"])
    orders = [lanes(placement, f"node-{number}") for number in range(20)]
    assert {order.own for order in orders} == {()}
    assert {placement.owner(order.peers[0]) for order in orders} == {"a", "b", "c"}


@pytest.mark.parametrize(("members", "each"), [(0, 8), (1, 8), (2, 4), (3, 3), (8, 1), (9, 1), (1000, 1)])
def test_all_members_together_read_from_the_mirror_what_one_alone_would(members: int, each: int) -> None:
    assert own_in_flight(members, 8) == each
