"""What is old enough to be collected."""

from bdn.core.store import CLOCKS_SECONDS, collectable_before


def test_only_what_is_older_than_the_grace_may_go() -> None:
    assert collectable_before(1000.0, 100.0, None) == 900.0


def test_nothing_may_go_that_happened_since_the_oldest_mirror_at_work_began() -> None:
    assert collectable_before(1000.0, 100.0, 500.0) == 500.0 - CLOCKS_SECONDS
    assert collectable_before(1000.0, 600.0, 990.0) == 400.0
