"""Whoever computes a placement, from whatever order of members, finds the same owners with bounded loads."""

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from bdn.core.chunk import Digest
from bdn.core.ring.placement import Placement
from tests.support.content.names import named

chunk_lists = st.integers(0, 60).map(lambda count: [named(f"chunk {number}") for number in range(count)])
member_lists = st.lists(st.text(max_size=8), min_size=1, max_size=12, unique=True)
bounds = st.sampled_from([1.0, 1.05, 1.1, 1.5, 100.0])


def by_score(chunk: Digest, members: list[str]) -> list[str]:
    def score(member: str) -> int:
        return xxh3_64_intdigest(chunk.to_bytes(), seed=xxh3_64_intdigest(member.encode()))

    return sorted(sorted(members), key=score, reverse=True)


def owners_of(placement: Placement) -> list[str | None]:
    return [placement.owner(index) for index in range(len(placement))]


@given(chunks=chunk_lists, members=member_lists, bound=bounds)
def test_each_chunk_belongs_to_the_best_member_that_has_room(
    chunks: list[Digest], members: list[str], bound: float
) -> None:
    share = ceil(bound * len(chunks) / len(members))
    loads: Counter[str] = Counter()
    expected: list[str] = []
    for chunk in chunks:
        expected.append(next(member for member in by_score(chunk, members) if loads[member] < share))
        loads[expected[-1]] += 1
    assert owners_of(Placement(chunks, members, load_bound=bound)) == expected


@given(chunks=chunk_lists, members=member_lists, bound=bounds, data=st.data())
def test_the_order_of_members_plays_no_part(
    chunks: list[Digest], members: list[str], bound: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(members))
    one, other = Placement(chunks, members, load_bound=bound), Placement(chunks, shuffled * 2, load_bound=bound)
    assert owners_of(one) == owners_of(other)
    assert [one.owners(index, 3) for index in range(len(one))] == [other.owners(index, 3) for index in range(len(one))]


@given(chunks=chunk_lists, members=member_lists, count=st.integers(1, 14))
def test_after_the_owner_the_others_come_by_their_score(chunks: list[Digest], members: list[str], count: int) -> None:
    placement = Placement(chunks, members, load_bound=1.0)
    for index, chunk in enumerate(chunks):
        owner = placement.owner(index)
        assert owner is not None
        rest = [member for member in by_score(chunk, members) if member != owner]
        assert placement.owners(index, count) == (owner, *rest)[:count]


@given(chunks=chunk_lists, members=member_lists, newcomer=st.text(max_size=8))
def test_without_a_bound_a_newcomer_takes_chunks_and_nobody_else_does(
    chunks: list[Digest], members: list[str], newcomer: str
) -> None:
    before = Placement(chunks, members, load_bound=100.0)
    after = Placement(chunks, [*members, newcomer], load_bound=100.0)
    for index in range(len(chunks)):
        assert after.owner(index) in {before.owner(index), newcomer}
