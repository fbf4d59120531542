"""Ways to be hurt by numbers that agents say."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_NUMBERS: Final = "tests/promises/test_hostile_numbers.py"
_CLOCKS: Final = f"{_NUMBERS}::test_what_a_clock_that_is_far_off_has_dated_is_shown_and_goes_in_time"
_HEARTBEATS: Final = f"{_NUMBERS}::test_every_number_of_a_heartbeat_may_be_any_number[sqlite]"
_EVENTS: Final = f"{_NUMBERS}::test_every_number_of_every_kind_of_event_may_be_any_number"


def _broken(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("hostile-input", file, what, old, new, test)


BREAKAGES: Final = [
    Breakage(
        "hostile-input",
        "bdn/wire/agent_schema.py",
        "a heartbeat has a number that nobody has tried",
        "    leaving: bool = False\n    wait_seconds",
        "    leaving: bool = False\n    age: int = 0\n    wait_seconds",
        "tests/promises/test_hostile_numbers.py::test_the_heartbeat_that_is_tried_has_every_number_that_one_may_have",
    ),
    _broken("bdn/wire/shapes.py", "a time that no date can say fails", "min(max(seconds, _FIRST), _LAST)", "seconds", _CLOCKS),
    _broken("bdn/mirror/events.py", "every clock of an agent is believed", "if at <= now + _AHEAD_SECONDS else now", "if at <= 1e99 else now",
            _CLOCKS),
    _broken("bdn/mirror/events.py", "what is dated in the far future stays for ever",
            "await events.redate(session, now + self.keep_seconds, now)", "pass", _CLOCKS),
    _broken("bdn/wire/shapes.py", "an agent may report more than a column holds", "Field(ge=0, le=LARGEST)", "Field(ge=0)",
            _HEARTBEATS),
    _broken("bdn/wire/shapes.py", "what agents report together may be more than a column holds", "return min(one + other, LARGEST)",
            "return one + other", _HEARTBEATS),
    _broken("bdn/core/units.py", "a size that no float holds fails", "float(max(-sys.float_info.max, min(size, sys.float_info.max)))",
            "float(size)", f"{_EVENTS}[sqlite]"),
    _broken("bdn/mirror/db/errors.py", "a fact that is no number is the database's fault", '"22P02":', '"22XXX":',
            f"{_EVENTS}[postgres]"),
    Breakage("access", "bdn/mirror/api/credentials.py", "whoever rotates its secrets rotates those of all",
             "caller.role is Role.OPERATOR and named is None", "named is None",
             "tests/promises/test_access_matrix.py::test_whoever_is_no_operator_rotates_its_own_secrets_and_hears_of_no_others"),
    Breakage("access", "bdn/mirror/api/credentials.py", "an operator rotates the secrets of its own organisation alone",
             "caller.role is Role.OPERATOR and named is None", "False",
             "tests/integration/test_mirror_secrets.py"
             "::test_an_operator_rotates_the_secrets_of_all_and_hears_how_many_are_left[sqlite]"),
]  # fmt: skip
