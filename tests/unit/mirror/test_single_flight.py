"""One piece of work at a time per key, and who takes over when its leader fails."""

import asyncio

import pytest

from bdn.mirror.waiting import SingleFlight


class Work:
    """Counts how often it is done, and ends when it is told how."""

    def __init__(self) -> None:
        self.begun = 0
        self.outcomes: list[asyncio.Future[str]] = []

    async def __call__(self) -> str:
        self.begun += 1
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.outcomes.append(outcome)
        return await outcome


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_whoever_asks_while_work_is_under_way_gets_its_result() -> None:
    flights, work = SingleFlight[str, str](), Work()
    asking = [asyncio.create_task(flights.run("k", work)) for _ in range(3)]
    await turns()
    work.outcomes[0].set_result("done")
    assert await asyncio.gather(*asking) == ["done"] * 3
    assert work.begun == 1


async def test_a_result_stays_until_it_is_forgotten() -> None:
    flights, work = SingleFlight[str, str](), Work()
    first = asyncio.create_task(flights.run("k", work))
    await turns()
    work.outcomes[0].set_result("done")
    await first
    assert await flights.run("k", work) == "done"
    flights.forget(["k"])
    again = asyncio.create_task(flights.run("k", work))
    await turns()
    assert work.begun == 2
    work.outcomes[1].set_result("anew")
    assert await again == "anew"


async def test_other_keys_do_not_wait() -> None:
    flights, work = SingleFlight[str, str](), Work()
    asking = [asyncio.create_task(flights.run(key, work)) for key in "ab"]
    await turns()
    assert work.begun == 2
    for outcome in work.outcomes:
        outcome.set_result("")
    await asyncio.gather(*asking)


@pytest.mark.parametrize("canceled", [False, True], ids=["fails", "is canceled"])
async def test_when_the_leader_ends_without_a_result_a_waiter_takes_over(canceled: bool) -> None:
    flights, work = SingleFlight[str, str](), Work()
    leader, waiter, other = [asyncio.create_task(flights.run("k", work)) for _ in range(3)]
    await turns()
    if canceled:
        leader.cancel()
    else:
        work.outcomes[0].set_exception(ValueError("the leader's own"))
    await turns()
    assert work.begun == 2
    work.outcomes[1].set_result("done")
    assert [await waiter, await other] == ["done", "done"]
    with pytest.raises(asyncio.CancelledError if canceled else ValueError):
        await leader


async def test_a_waiter_that_is_canceled_leaves_the_others_alone() -> None:
    flights, work = SingleFlight[str, str](), Work()
    leader, waiter = [asyncio.create_task(flights.run("k", work)) for _ in range(2)]
    await turns()
    waiter.cancel()
    await turns()
    work.outcomes[0].set_result("done")
    assert await leader == "done"


async def test_forgetting_does_not_take_away_work_that_was_begun_anew() -> None:
    flights, work = SingleFlight[str, str](), Work()
    first = asyncio.create_task(flights.run("k", work))
    await turns()
    work.outcomes[0].set_result("old")
    await first
    flights.forget(["k"])
    leader = asyncio.create_task(flights.run("k", work))
    await turns()
    flights.forget(["k"])  # who waited for the old result, and only now has told the database
    waiter = asyncio.create_task(flights.run("k", work))
    await turns()
    assert work.begun == 2
    work.outcomes[1].set_exception(ValueError)
    await turns()
    assert work.begun == 3
    work.outcomes[2].set_result("new")
    assert await waiter == "new"
    with pytest.raises(ValueError):
        await leader
