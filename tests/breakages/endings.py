"""Ways for a stage that ends to come back, or to keep what it leased, and the test that notices each."""

from __future__ import annotations

from functools import partial
from typing import Final

from tests.support.promises.breakages import Breakage

_TEST: Final = "tests/promises/test_leases.py::"
_HALF_WAY: Final = (
    f"{_TEST}test_a_stage_that_was_released_half_way_is_built_anew_for_who_asks_again_and_for_nobody_else"
)
_VIEWS, _RECORDS = f"{_HALF_WAY}[keep_views]", f"{_HALF_WAY}[keep_records]"
_ASKED: Final = f"{_TEST}test_a_stage_that_is_asked_for_while_it_fails_leases_nothing"
_LIFECYCLE: Final = "node_agent/stage/lifecycle.py"
_STAGES: Final = "node_agent/stage/stages.py"

_breakage = partial(Breakage, "leases")

BREAKAGES: Final = [
    _breakage(
        _LIFECYCLE,
        "a stage is mended while it is being released",
        "not stage.is_working and not stage.lock.locked() and",
        "not stage.is_working and",
        f"{_TEST}test_a_stage_that_is_just_being_released_is_not_mended",
    ),
    _breakage(
        _LIFECYCLE,
        "a mend goes on while its stage is released",
        "                await self.stop(stage)\n",
        "",
        f"{_TEST}test_a_mend_that_has_begun_ends_with_the_release",
    ),
    _breakage(
        _LIFECYCLE,
        "a stage that was released half-way is mended for nobody",
        "not stage.lock.locked() and not stage.is_ending\n",
        "not stage.lock.locked()\n",
        _RECORDS,
    ),
    _breakage(
        _LIFECYCLE,
        "nobody knows that a release ended half-way",
        "        stage.is_ending = True\n        note =",
        "        note =",
        _VIEWS,
        also=(_RECORDS,),
    ),
    _breakage(
        _STAGES,
        "a stage that was released half-way is READY for who asks again",
        '(stage.record.state == "READY" and not stage.is_ending)',
        'stage.record.state == "READY"',
        _VIEWS,
        also=(_RECORDS,),
    ),
    _breakage(
        _STAGES,
        "a stage that shows nothing is renewed",
        "            if stage.is_ending:\n",
        "            if False:\n",
        _RECORDS,
    ),
    _breakage(
        _LIFECYCLE,
        "what was built anew cannot be renewed",
        "        stage.is_ending = False\n",
        "",
        _RECORDS,
    ),
    _breakage(
        _STAGES,
        "a pull whose leases have ended is READY",
        "is_ready and not known.is_ending and",
        "is_ready and",
        f"{_TEST}test_a_pull_whose_release_was_not_recorded_is_leased_again_by_the_next_pull",
    ),
    _breakage(
        _LIFECYCLE,
        "who asks for a stage that fails makes it lease again",
        "        if not stage.is_ending:\n            self.lease_again",
        "        if True:\n            self.lease_again",
        _ASKED,
    ),
    _breakage(
        _STAGES,
        "a stage that failed is mended",
        '                if stage.record.state != "READY":  #',
        "                if False:  #",
        _ASKED,
    ),
    _breakage(
        _LIFECYCLE,
        "a stage that fails does not say so",
        "        stage.is_ending = True\n        logger",
        "        logger",
        _ASKED,
    ),
]
