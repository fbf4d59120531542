"""The order of a node's requests."""

from __future__ import annotations

import pytest

from bdn.core.ring.placement import Placement
from bdn.core.ring.routes import lanes, own_in_flight
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(40)]


def test_in_a_cluster_without_members_everything_is_read_from_the_mirror() -> None:
    order = lanes(Placement(CHUNKS, []), "me")
    assert (order.own, order.peers) == (tuple(range(40)), ())


def test_a_single_member_asks_no_peer() -> None:
    assert lanes(Placement(CHUNKS, ["me"]), "me").peers == ()


def test_a_node_that_is_no_member_asks_its_peers_for_everything() -> None:
    order = lanes(Placement(CHUNKS, ["a", "b"]), "me")
    assert order.own == ()
    assert sorted(order.peers) == list(range(40))


def test_nodes_that_are_no_members_begin_with_different_owners() -> None:
    placement = Placement(CHUNKS, ["a", "b", "c"])
    assert {placement.owner(lanes(placement, f"node-{number}").peers[0]) for number in range(20)} == {"a", "b", "c"}


@pytest.mark.parametrize(("members", "each"), [(0, 8), (1, 8), (2, 4), (3, 3), (8, 1), (9, 1), (1000, 1)])
def test_all_members_together_read_from_the_mirror_what_one_alone_would(members: int, each: int) -> None:
    assert own_in_flight(members, 8) == each


def test_the_order_in_which_members_are_named_plays_no_part() -> None:
    assert lanes(Placement(CHUNKS, ["b", "a", "c"]), "a") == lanes(Placement(CHUNKS, ["a", "b", "c", "b"]), "a")
