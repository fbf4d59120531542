"""Who waits goes on asking, for a while, and says so once."""

from __future__ import annotations

import sys

import pytest

from bdn.core.errors import BdnError, NotFoundError
from bdn.core.pace.retry import RetryPolicy
from bdn.net.client.service_client import OutageRetry
from bdn.wire.errors import ServiceUnreachableError

SILENCE = ServiceUnreachableError("http://mirror", "connection reset")


class Asked:
    """Answers in turn; an error is raised."""

    def __init__(self, *answers: str | BdnError) -> None:
        self.times = 0
        self._answers = answers

    async def __call__(self) -> str:
        answer = self._answers[min(self.times, len(self._answers) - 1)]
        self.times += 1
        if isinstance(answer, BdnError):
            raise answer
        return answer


def persistence(seconds: float, told: list[BdnError | None], longest_seconds: float = 0.001) -> OutageRetry:
    policy = RetryPolicy(attempts=sys.maxsize, first_seconds=longest_seconds, longest_seconds=longest_seconds)
    return OutageRetry(seconds, told.append, policy)


async def test_a_silence_is_endured_and_told_once_and_so_is_its_end() -> None:
    told: list[BdnError | None] = []
    asked = Asked(SILENCE, SILENCE, SILENCE, "SYNCING", SILENCE, "READY")
    asking = persistence(60, told)

    assert [await asking.ask(asked), await asking.ask(asked)] == ["SYNCING", "READY"]
    assert told == [SILENCE, None, SILENCE, None]


async def test_a_silence_that_lasts_is_an_error() -> None:
    told: list[BdnError | None] = []
    asked = Asked(SILENCE)

    with pytest.raises(ServiceUnreachableError):
        await persistence(0.05, told).ask(asked)
    assert asked.times > 1
    assert told == [SILENCE]


async def test_what_does_not_pass_is_not_asked_again() -> None:
    told: list[BdnError | None] = []
    asked = Asked(NotFoundError("mirror mir_1"))

    with pytest.raises(NotFoundError):
        await persistence(60, told).ask(asked)
    assert (asked.times, told) == (1, [])
