"""Whatever peers do, each is avoided for a bounded time, and deadlines follow everything that came."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bdn.core.ring.peer_health import Deadlines, Fault, PeerHealth
from node_agent.fetch.fill_context import RetryBudget

PEERS = ["a", "b", "c"]
peers = st.sampled_from(PEERS)


class HealthMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.health = PeerHealth()
        self.now = 0.0
        self.blamed: dict[str, list[tuple[float, Fault]]] = {peer: [] for peer in PEERS}
        self.tried: dict[str, float] = {}  # trials that nobody reported, by when they began
        self.is_trusted = dict.fromkeys(PEERS, True)  # whether all may ask once it is not avoided

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 29.0, 61.0, 601.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(peer=peers, fault=st.sampled_from(Fault))
    def blame(self, peer: str, fault: Fault) -> None:
        self.health.blame(peer, fault, self.now)
        self.blamed[peer].append((self.now, fault))
        self.tried.pop(peer, None)
        self.is_trusted[peer] = False
        assert self.health.is_avoided(peer, self.now)

    @rule(peer=peers)
    def claim(self, peer: str) -> None:
        was_avoided = self.health.is_avoided(peer, self.now)
        assert self.health.claim(peer, self.now) == (not was_avoided)
        if not was_avoided and not self.is_trusted[peer]:
            assert self.now >= self.tried.get(peer, -30.0) + 30.0
            self.tried[peer] = self.now
            assert self.health.is_avoided(peer, self.now)

    @rule(peer=peers)
    def succeed(self, peer: str) -> None:
        is_tried = peer in self.tried
        self.health.succeeded(peer, self.now)
        if is_tried:
            del self.tried[peer]
            self.is_trusted[peer] = True
        if self.is_trusted[peer]:
            assert not self.health.is_avoided(peer, self.now)
        elif not self.health.is_avoided(peer, self.now):
            self.is_trusted[peer] = True

    @rule(kept=st.sets(peers))
    def keep(self, kept: set[str]) -> None:
        self.health.keep(kept)
        for peer in set(PEERS) - kept:
            self.blamed[peer] = []
            self.tried.pop(peer, None)
            self.is_trusted[peer] = True

    @invariant()
    def nobody_is_avoided_without_or_for_longer_than_its_faults(self) -> None:
        for peer in PEERS:
            faults = self.blamed[peer]
            longest = 60 if all(fault is Fault.FAILED for _, fault in faults) else 600
            last = faults[-1][0] if faults else -1000.0
            if self.health.is_avoided(peer, self.now):
                assert self.now < max(last + longest, self.tried.get(peer, -30.0) + 30.0)

    @invariant()
    def after_a_lie_a_peer_is_avoided_for_half_a_minute(self) -> None:
        for peer in PEERS:
            if any(fault is Fault.WRONG and self.now < at + 30 for at, fault in self.blamed[peer]):
                assert self.health.is_avoided(peer, self.now)

    @invariant()
    def those_who_are_avoided_are_told(self) -> None:
        assert self.health.avoided(self.now) == tuple(peer for peer in PEERS if self.health.is_avoided(peer, self.now))


TestHealthMachine = HealthMachine.TestCase
TestHealthMachine.settings = settings(max_examples=settings().max_examples // 2)


MIB = 1024 * 1024
arrivals = st.tuples(st.integers(0, 8 * MIB), st.floats(0, 60))


def after(*came: tuple[int, float]) -> Deadlines:
    """Deadlines once so many chunks of 7 MiB have come, each in so many seconds."""
    deadlines = Deadlines()
    for times, seconds in came:
        for _ in range(times):
            deadlines.came(7 * MIB, seconds)
    return deadlines


@pytest.mark.parametrize(("came", "deadline"), [
    ([], 300), ([(7, 1.0)], 300),  # nothing is known yet
    ([(8, 1.0)], 4), ([(99, 1.0)], 4), ([(100, 1.0)], 2), ([(200, 1.0)], 2),
    ([(200, 0.001)], 1), ([(200, 1000.0)], 300),
    ([(2, 9.0), (198, 1.0)], 2), ([(3, 9.0), (197, 1.0)], 18),  # one in a hundred is bad luck
    ([(100, 9.0), (198, 1.0)], 2), ([(100, 9.0), (197, 1.0)], 18),  # the last two hundred count
])  # fmt: skip
def test_patience_is_twice_what_ninety_nine_in_a_hundred_took_lately(
    came: list[tuple[int, float]], deadline: float
) -> None:
    deadlines = after(*came)
    assert deadlines.deadline(7 * MIB) == deadline
    if 1 < deadline < 100:
        assert deadlines.deadline(15 * MIB) == 2 * deadline  # of what is twice as much, with what each answer costs


def test_who_is_given_up_does_not_make_us_less_patient_with_the_next() -> None:
    deadlines = after((3, 9.0), (197, 1.0))
    for _ in range(300):
        deadlines.left()
    assert deadlines.deadline(7 * MIB) == 18


@given(came=st.lists(st.one_of(arrivals, st.none()), max_size=300), sizes=st.tuples(*[st.integers(0, 8 * MIB)] * 2))
def test_a_deadline_has_bounds_and_more_bytes_have_more_time(
    came: list[tuple[int, float] | None], sizes: tuple[int, int]
) -> None:
    deadlines = Deadlines()
    for one in came:
        if one is None:
            deadlines.left()
        else:
            deadlines.came(*one)
    less, more = (deadlines.deadline(size) for size in sorted(sizes))
    assert 1.0 <= less <= more <= 300.0


@given(seed=st.integers(0, 10**6))
def test_a_source_that_stays_as_it_is_rarely_meets_its_deadline(seed: int) -> None:
    random, missed = Random(seed), 0
    deadlines = Deadlines(shortest=0.0)
    for _ in range(500):
        seconds = 0.05 + random.expovariate(20)
        if seconds > deadlines.deadline(8 * MIB):
            deadlines.left()
            missed += 1
        else:
            deadlines.came(8 * MIB, seconds)
    assert missed <= 5


@given(stage_size=st.integers(0, 10_000), sizes=st.lists(st.integers(0, 300), max_size=60))
def test_what_was_allowed_is_never_more_than_the_share(stage_size: int, sizes: list[int]) -> None:
    budget = RetryBudget(stage_size, list)
    allowed = 0
    for size in sizes:
        fits = (allowed + size) * 20 <= stage_size
        assert budget.hedge(size) == fits
        allowed += size if fits else 0
        assert budget.document().bytes_hedged == allowed
