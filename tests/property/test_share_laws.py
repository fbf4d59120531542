"""Places are granted round robin over organisations, within their count, and none is lost, whoever requests and releases when."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.core.pace.shares import Place, Shares

OWNERS = ("a", "b", "c", "d")
STEPS = st.lists(st.sampled_from(OWNERS) | st.integers(0, 30), max_size=80)
COUNTS = st.integers(1, 12)


def played(shares: Shares, steps: list[str | int]) -> tuple[list[Place], list[Place]]:
    """Requests by owner, and releases of the place of that number; those that are held and those that wait in the end."""
    places: list[Place] = []
    for step in steps:
        if isinstance(step, str):
            places.append(shares.request(step))
        elif places:
            shares.release(places.pop(step % len(places)))
        shares.grant()
        assert shares.taken == sum(place.is_granted for place in places) <= shares.count
    return [place for place in places if place.is_granted], [place for place in places if not place.is_granted]


def held_by(owner: str, places: list[Place]) -> int:
    return sum(place.owner == owner for place in places)


@given(COUNTS, STEPS)
def test_shares__owners_wait__no_place_that_one_may_have_is_free(count: int, steps: list[str | int]) -> None:
    held, waiting = played(Shares(count), steps)
    assert not waiting or len(held) == count


@given(COUNTS, STEPS)
def test_with_spares_an_owner_waits_only_while_it_holds_as_many_as_are_free(count: int, steps: list[str | int]) -> None:
    held, waiting = played(Shares(count, spares=True), steps)
    free = count - len(held)
    assert all(held_by(place.owner, held) >= free for place in waiting)


@given(COUNTS, st.integers(1, 40))
def test_with_spares_one_owner_holds_half_and_the_next_one_is_granted_at_once(count: int, wanted: int) -> None:
    shares = Shares(count, spares=True)
    mine = [shares.request("a") for _ in range(wanted)]
    shares.grant()
    assert sum(place.is_granted for place in mine) == min(wanted, (count + 1) // 2)
    other = shares.request("b")
    shares.grant()
    assert other.is_granted or count == 1


@given(COUNTS, STEPS, st.booleans())
def test_shares__owner_without_a_place__waits_for_one_round_at_most(
    count: int, steps: list[str | int], spares: bool
) -> None:
    """However many are requested before and after, each other owner is granted one place at the most first."""
    shares = Shares(count, spares=spares)
    held, _ = played(shares, steps)
    newcomer = shares.request("new")
    passed: list[Place] = []
    while newcomer not in passed:
        for owner in OWNERS:  # they never stop
            shares.request(owner)
        granted = shares.grant()
        held += granted
        passed += granted
        shares.release(held.pop(0))
    before = [place.owner for place in passed[: passed.index(newcomer)]]
    assert all(before.count(owner) <= 1 for owner in OWNERS)


@given(COUNTS, STEPS, st.booleans())
def test_places_of_one_owner_are_granted_in_their_order(count: int, steps: list[str | int], spares: bool) -> None:
    shares = Shares(count, spares=spares)
    held, waiting = played(shares, steps)
    for owner in OWNERS:
        theirs, granted = [place for place in waiting if place.owner == owner], []
        for _ in range(200):
            if not held:
                break
            shares.release(held.pop(0))
            more = shares.grant()
            held += more
            granted += [place for place in more if place.owner == owner]
        assert granted == theirs[: len(granted)]
        waiting = [place for place in waiting if not place.is_granted]


@given(COUNTS, COUNTS, STEPS)
def test_a_smaller_count_grants_nothing_before_enough_are_released(
    count: int, later: int, steps: list[str | int]
) -> None:
    shares = Shares(count)
    held, _ = played(shares, steps)
    shares.count = later
    more = shares.grant()
    assert not more or len(held) + len(more) <= later
