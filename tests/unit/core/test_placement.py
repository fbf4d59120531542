"""Which member owns which chunk: what can be said about single clusters."""

import pytest

from bdn.core.ring.placement import Placement
from tests.support.content.names import named

CHUNKS = [named(f"chunk {number}") for number in range(12)]
MEMBERS = ["node-a", "node-b", "node-c", "node-d"]


def test_owners_are_those_of_every_other_version_and_process() -> None:
    placement = Placement(CHUNKS, MEMBERS)
    assert "".join((placement.owner(index) or "")[-1] for index in range(12)) == "aadabbaddbcb"
    assert "".join(member[-1] for member in placement.owners(11, 4)) == "bcda"


def test_a_cluster_without_members_has_no_owners() -> None:
    placement = Placement(CHUNKS, [])
    assert placement.owner(3) is None
    assert placement.owners(3, 2) == ()
    assert len(placement) == 12


def test_a_single_member_owns_everything() -> None:
    placement = Placement(CHUNKS, ["alone"])
    assert {placement.owners(index, 3) for index in range(12)} == {("alone",)}


def test_nobody_is_asked_for_no_owners() -> None:
    assert Placement(CHUNKS, MEMBERS).owners(0, 0) == ()


def test_a_member_that_is_named_twice_counts_once() -> None:
    assert Placement(CHUNKS, ["a", "b", "a"]).members == ("a", "b")


def test_a_share_is_rounded_up() -> None:
    assert Placement(CHUNKS, MEMBERS).share == 4
    assert Placement(CHUNKS, MEMBERS, load_bound=1).share == 3
    assert Placement(CHUNKS, MEMBERS[:3], load_bound=1.3).share == 6


def test_a_bound_under_the_average_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.99"):
        Placement(CHUNKS, MEMBERS, load_bound=0.99)


@pytest.mark.parametrize(("members", "most"), [(8, 20), (64, 40)])
def test_who_leaves_or_comes_moves_its_own_share_and_few_other_chunks(members: int, most: int) -> None:
    chunks = [named(f"chunk {number}") for number in range(4000)]
    everybody = [f"node-{number}" for number in range(members)]
    full, without = Placement(chunks, everybody), Placement(chunks, everybody[:-1])
    theirs = {index for index in range(4000) if full.owner(index) == everybody[-1]}
    moved = {index for index in range(4000) if full.owner(index) != without.owner(index)}
    assert theirs <= moved
    assert len(moved - theirs) <= most  # 3 and 25; a bound that follows the average so far moves hundreds
