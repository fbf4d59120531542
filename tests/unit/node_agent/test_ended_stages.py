"""Which ended stages are forgotten."""

from node_agent.stage.housekeeping import KEPT, KEPT_SECONDS, to_forget


def test_the_newest_ten_thousand_of_a_week_are_kept_and_the_oldest_go_first() -> None:
    now = KEPT_SECONDS + 50.5
    ended_at = {f"stg_{second}": float(second) for second in range(KEPT + 70)}

    assert to_forget(ended_at, now) == [f"stg_{second}" for second in range(70)]
    assert to_forget({"old": 50.0, "new": 51.0}, now) == ["old"]
    assert to_forget({}, now) == []


def test_a_clock_that_was_set_back_forgets_nothing_before_its_time() -> None:
    assert to_forget({"from tomorrow": 86400.0}, 0.0) == []
