"""Committed and reserved bytes stay within the budget, at each of a million steps, with a neighbour on the same disk."""

import pytest

from tests.support.agent.ledger_steps import Disk
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("space")
SEEDS = 10


@pytest.mark.promise("leases")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_million_steps_never_pass_the_budget_nor_touch_what_is_leased(seed: int, scale: Scale, tally: Tally) -> None:
    counts = Disk(seed).run(scale.of(40_000, 1_000_000) // SEEDS)
    tally.add(**counts)
