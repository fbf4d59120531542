"""Ways to break what a lease promises, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_leases.py::"
_CLOCKS = f"{_TEST}test_a_clock_that_is_set_neither_ends_a_lease_nor_prolongs_it"
_LIFECYCLE = "node_agent/stage/lifecycle.py"

_MENDING = "tests/promises/test_leases.py::"
_LOST = f"{_MENDING}test_a_stage_whose_lost_file_does_not_fit_any_more_shows_what_it_showed_and_says_so"

_ASIDE = f"{_MENDING}test_a_ready_stage_says_what_the_scrub_had_to_put_aside_and_heals_where_it_stands"
_TWO = "tests/promises/test_two_agents.py::"
_OWNER = "node_agent/disk/cache_directory.py"

BREAKAGES: Final = [
    Breakage(
        "leases",
        _OWNER,
        "two agents have one directory",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        f"{_TWO}test_a_second_agent_ends_and_names_the_first_which_is_unharmed",
    ),
    Breakage(
        "leases",
        _OWNER,
        "who wrote its number into the lock has it for as long as that number lives",
        '        is_rebooted = _recorded(descriptor).get("boot_id") != boot_id()\n',
        '        is_rebooted = _recorded(descriptor).get("boot_id") != boot_id()\n'
        "        if Path(f\"/proc/{_recorded(descriptor).get('pid')}\").exists():\n"
        '            raise InUseError(f"cache directory {path.parent}", (_owner(descriptor),))\n',
        f"{_TWO}test_what_a_killed_agent_wrote_into_its_lock_keeps_no_other_from_starting",
    ),
    Breakage(
        "leases",
        _LIFECYCLE,
        "a READY stage that cannot be mended is taken down",
        "        give_up = self._keep if stage.is_mending else self._fail\n",
        "        give_up = self._fail\n",
        _LOST,
    ),
    Breakage(
        "leases",
        "node_agent/cache/admission.py",
        "an admission that is refused ends the leases that there were",
        "        for manifest in self._leased:\n            self.index.leases.take(manifest, self.holder)\n",
        "",
        _LOST,
    ),
    Breakage(
        "leases",
        "node_agent/stage/housekeeping.py",
        "what could not be mended is never tried again",
        "            self.lifecycle.mend(stage)\n\n    async def run",
        "            pass\n\n    async def run",
        _LOST,
    ),
    Breakage(
        "leases",
        "node_agent/stage/housekeeping.py",
        "what was about to expire is released although it was renewed",
        ', ending="expired", still=self.lifecycle.is_over)',
        ', ending="expired")',
        f"{_MENDING}test_a_stage_renewed_while_it_was_about_to_expire_stays",
    ),
    Breakage(
        "leases",
        _LIFECYCLE,
        "renewing prolongs nothing",
        "        self.live_on(stage)\n        if not stage.is_ending:\n",
        "        if not stage.is_ending:\n",
        f"{_TEST}test_whatever_clocks_restarts_and_renewals_do_a_stage_has_its_whole_time",
    ),
    Breakage(
        "leases",
        _LIFECYCLE,
        "time is counted by the wall clock",
        "        left = stage.deadline - self.elapsed()\n",
        "        left = (stage.record.expires_at or 0) - self.clock()\n",
        _CLOCKS,
    ),
    Breakage(
        "leases",
        _LIFECYCLE,
        "people are told a time that passed long ago",
        "        if abs(expires_at - (stage.record.expires_at or 0)) > _DRIFT_SECONDS:\n",
        "        if False:\n",
        _CLOCKS,
    ),
    Breakage(
        "leases",
        "node_agent/stage/housekeeping.py",
        "the time while no agent was there counts",
        "                self.lifecycle.live_on(stage)\n",
        "                self.lifecycle.live_on(stage)\n"
        "                if stage.deadline is not None and record.created_at < self.lifecycle.clock() - 3600:\n"
        "                    stage.deadline = 0.0\n",
        f"{_TEST}test_an_agent_that_was_down_for_longer_than_the_time_to_live_gives_it_again",
    ),
    Breakage(
        "leases",
        "node_agent/cache/node_cache.py",
        "a use after the clock went back is an old one",
        "max(self._wall(), self._last + _STEP_SECONDS)",
        "self._wall()",
        f"{_TEST}test_age_is_the_order_of_use_whatever_the_clock_says",
    ),
    Breakage(
        "leases",
        "node_agent/cache/tiers.py",
        "uses before a restart are forgotten by the clock of uses",
        "            uses.seen(order.last_used(manifest))\n",
        "            pass\n",
        f"{_TEST}test_age_is_the_order_of_use_whatever_the_clock_says",
    ),
    Breakage(
        "leases",
        "node_agent/stage/stages.py",
        "whoever asks for a stage is told READY although it is known to show a torn file",
        '        if stage.record.state != "READY" or stage.record.error:\n',
        '        if stage.record.state != "READY":\n',
        f"{_MENDING}test_nobody_is_told_that_a_stage_is_ready_which_is_known_to_show_a_torn_file",
    ),
    Breakage(
        "leases",
        _LIFECYCLE,
        "a READY stage does not notice that its file was put aside",
        "        return stage.mend_at is not None or not all(map(self.cache.index.is_complete, stage.record.manifests))\n",
        "        return stage.mend_at is not None\n",
        _ASIDE,
    ),
    Breakage(
        "leases",
        "node_agent/stage/staging.py",
        "the view of a running job is exchanged although it healed where it stands",
        "        if stage.is_mending and await in_thread(self._is_whole, stage, held):\n",
        "        if False:\n",
        _ASIDE,
    ),
]
