"""Moments at which something is due: each once, at the latest when its time has come."""

from hypothesis import given
from hypothesis import strategies as st

from bdn.net.chunk_server.server import Timers
from tests.support.network.hypothesis import BRIEFLY

KEYS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 30)),
    st.tuples(st.just("clear"), KEYS, st.just(0)),
    st.tuples(st.just("due"), st.just(0), st.integers(0, 10)),
)


@BRIEFLY
@given(st.lists(STEPS, max_size=60))
def test_a_key_is_due_once_when_its_last_moment_has_come(steps: list[tuple[str, int, int]]) -> None:
    timers, oracle, now = Timers(), dict[int, float](), 0.0
    for step, key, number in steps:
        match step:
            case "set":
                timers.set(key, now + number)
                oracle[key] = now + number
            case "clear":
                timers.clear(key)
                oracle.pop(key, None)
            case _:
                now += number
                due = {key for key, moment in oracle.items() if moment <= now}
                found = timers.due(now)
                assert sorted(found) == sorted(due)
                oracle = {key: moment for key, moment in oracle.items() if key not in due}
        if oracle:  # who sleeps until then misses nothing
            assert timers.next is not None
            assert timers.next <= min(oracle.values())


def test_a_moment_that_moves_later_again_and_again_costs_one_entry() -> None:
    timers = Timers()
    for number in range(1000):
        timers.set(7, 60.0 + number)
    assert len(timers._heap) == 1
    assert timers.due(1058) == []
    assert timers.due(1059) == [7]
